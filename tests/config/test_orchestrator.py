"""`[orchestrator]` as it is written in a file."""

from pathlib import Path

import pytest

from pellucid.config import (
    CustomAdvantageConfig,
    DefaultAdvantageConfig,
    GroupAdvantageConfig,
    OrchestratorRunConfig,
    RLConfig,
    SamplingConfig,
)
from pellucid.config.parse import parse
from pellucid.errors import ConfigError

FILE = """
model.name = "m"

[orchestrator]
rollouts_per_example = 4

[orchestrator.sampling]
temperature = 0.9
max_tokens = 100

[[orchestrator.env]]
id = "arithmetic"
state_columns = ["tool_results"]

[[orchestrator.env]]
id = "verifiers:shout-tasks"
name = "shout"
weight = 2.0
args = { words = ["hi"], select = { limit = 3 } }

[orchestrator.env.sampling]
max_tokens = 20

[[orchestrator.filter]]
import_path = "mine:short"
kwargs = { max_tokens = 50 }
"""


def read(tmp_path: Path, text: str, *flags: str) -> RLConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return parse(RLConfig, ["@", str(path), *flags], prog="pellucid rl").config


def test_environments_filters_and_their_settings(tmp_path: Path) -> None:
    own = read(tmp_path, FILE).orchestrator
    first, second = own.env
    assert own.sampling_of(first) == own.sampling == SamplingConfig(temperature=0.9, max_tokens=100)
    assert own.sampling_of(second) == SamplingConfig(temperature=0.9, max_tokens=20)
    assert (first.state_columns, second.state_columns) == (("tool_results",), ())
    assert second.args == {"words": ["hi"], "select": {"limit": 3}}
    [each] = own.filter
    assert (each.import_path, each.kwargs) == ("mine:short", {"max_tokens": 50})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], DefaultAdvantageConfig()),
        (["--orchestrator.advantage.type", "rloo"], GroupAdvantageConfig(type="rloo")),
        (["--orchestrator.advantage.type", "grpo_std"], GroupAdvantageConfig(type="grpo_std")),
        (["--orchestrator.advantage.type", "max_rl"], GroupAdvantageConfig(type="max_rl")),
        (["--orchestrator.advantage.type", "none"], GroupAdvantageConfig(type="none")),
        (
            ["--orchestrator.advantage.type", "custom", "--orchestrator.advantage.import-path", "mine:f"],
            CustomAdvantageConfig(type="custom", import_path="mine:f"),
        ),
    ],
)
def test_advantages_by_flag(tmp_path: Path, flags: list[str], expected: object) -> None:
    assert read(tmp_path, FILE, *flags).orchestrator.advantage == expected


@pytest.mark.parametrize("kind", ["default", "rloo", "grpo_std", "max_rl"])
def test_a_group_of_one_gives_no_signal_to_those_that_compare(tmp_path: Path, kind: str) -> None:
    flags = ["--orchestrator.rollouts-per-example", "1", "--orchestrator.advantage.type", kind]
    with pytest.raises(ConfigError, match=f"advantage.type = '{kind}' gives every rollout the advantage 0"):
        read(tmp_path, FILE, *flags)


def test_the_reward_itself_needs_no_group(tmp_path: Path) -> None:
    flags = ["--orchestrator.rollouts-per-example", "1", "--orchestrator.advantage.type", "none"]
    assert read(tmp_path, FILE, *flags).orchestrator.rollouts_per_example == 1


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("max_tokens = 20", "top_p = 0.9", r"orchestrator\.env.*top_p"),
        ("max_tokens = 20", "temperature = 0.0", r"orchestrator\.env.*temperature.*greater than 0"),
        ('"mine:short"', '"mine"', r"orchestrator\.filter.*import_path.*is not an import path"),
    ],
)
def test_wrong_settings_name_their_key(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, FILE.replace(old, new))


def test_state_columns_do_not_hide_what_every_rollout_has(tmp_path: Path) -> None:
    columns = '["tool_results"]'
    always = FILE.replace(columns, '["trajectory", "plan", "sampling_args", "plan"]')
    assert read(tmp_path, always).orchestrator.env[0].state_columns == ("plan",)
    with pytest.raises(ConfigError, match=r"state_columns.*'reward' is a field of saved rollouts"):
        read(tmp_path, FILE.replace(columns, '["plan", "reward"]'))


def test_tool_tokens_cost_as_much_as_sampled_ones_by_default(tmp_path: Path) -> None:
    own = read(tmp_path, FILE, "--orchestrator.advantage.length-penalty.type", "tokens").orchestrator
    assert isinstance(own.advantage, DefaultAdvantageConfig)
    penalty = own.advantage.length_penalty
    assert (penalty.completion_weight, penalty.tool_response_weight) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "in_flight", "held"),
    [
        ([], 4 * 64, 64 + 4096),
        (["--inference.max-concurrent", "8", "--inference.max-queued", "2"], 4 * 8, 10),
        (["--inference.servers", '["http://a:1", "http://b:1"]'], 4 * 64 * 2, 2 * (64 + 4096)),
        (["--inference.max-concurrent", "1", "--orchestrator.rollouts-per-example", "16"], 16, 1 + 4096),
        (["--orchestrator.max-inflight-rollouts", "5000"], 5000, 64 + 4096),
    ],
    ids=["default", "few slots", "two servers", "a group", "set"],
)
def test_rollouts_in_flight_are_four_for_each_slot_of_the_servers(
    flags: list[str], in_flight: int, held: int
) -> None:
    env = '[{"id": "arithmetic"}]'
    arguments = ["--model.name", "m", "--orchestrator.env", env, *flags]
    config = parse(OrchestratorRunConfig, arguments, prog="pellucid orchestrator").config
    assert (config.max_inflight_rollouts, config.max_held_requests) == (in_flight, held)
