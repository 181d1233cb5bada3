"""The documentation is tested: its code runs, its tables are current, its links lead somewhere."""

import asyncio
import re
import runpy
import sys
import types
from collections.abc import Iterable
from importlib import import_module
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import pellucid.export
from pellucid.cli import main
from pellucid.config import CustomAdvantageConfig, CustomLossConfig, DppoLossConfig, EnvConfig, FilterConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.data.schema import COLUMNS, FIELDS, Column
from pellucid.launch.run_folder import LOCK, WRITTEN_BY_A_RUN
from pellucid.loss import LossInputs, Ratios, dppo_loss, loss_for
from pellucid.orchestrator import AdvantageInputs, FilterInputs
from pellucid.orchestrator.advantage import ScoredRollout, load_advantage
from pellucid.orchestrator.environment import load_environment
from pellucid.orchestrator.verdict import load_filter

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("skills/*/*.md")])


@pytest.fixture
def docs_modules(monkeypatch):
    """The Python blocks of a page that name a file, as modules under that name."""

    def load(page: str) -> None:
        text = (ROOT / "docs" / page).read_text()
        for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL):
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(code, f"{page}:{name}.py", "exec"), module.__dict__)

    return load


@pytest.fixture
def attempted():
    """A rollout with this reply, of one token per letter."""

    def make(text: str, finish_reason: str = "stop") -> Rollout:
        completion = Completion([7] * len(text), [-0.5] * len(text), [(0, len(text))], finish_reason)
        return Rollout("g0-r0", "g0", Example("0", []), "env", 1.0, [Turn([5], completion, text)], 0.0)

    return make


class Scripted:
    """A session that answers from a list."""

    def __init__(self, *replies: str) -> None:
        self._replies = iter(replies)
        self.asked: list[int] = []

    async def respond(self, messages) -> str:
        self.asked.append(len(messages))
        return next(self._replies)


def test_the_single_turn_environment(docs_modules) -> None:
    docs_modules("write-an-environment.md")
    environment = load_environment(EnvConfig(id="shout:Shout", args={"words": ["hi"]}), seed=0)
    example = environment.example(3)
    right = asyncio.run(environment.rollout(example, Scripted("HI")))
    wrong = asyncio.run(environment.rollout(example, Scripted("ho!")))
    assert (right.reward, right.metrics) == (1.0, {"length": 2.0})
    assert (wrong.reward, wrong.metrics) == (0.0, {"length": 3.0})


def test_the_multi_turn_environment(docs_modules) -> None:
    docs_modules("write-an-environment.md")
    environment = load_environment(EnvConfig(id="guess:Guess"), seed=0)
    example = Example("0", [{"role": "user", "content": "guess"}], {"secret": 7})
    session = Scripted("1", "7")
    assert asyncio.run(environment.rollout(example, session)).reward == 0.5
    assert session.asked == [1, 3]


def test_the_group_scores(docs_modules, attempted) -> None:
    docs_modules("write-an-environment.md")
    environment = load_environment(EnvConfig(id="brief:Brief"), seed=0)
    rollouts = [attempted("hello there"), attempted("hi"), attempted("yo")]
    assert [score.reward for score in asyncio.run(environment.score_group(rollouts))] == [0.0, 1.0, 1.0]
    assert environment.requires_group_scoring


def test_the_heavy_reward(docs_modules) -> None:
    docs_modules("write-an-environment.md")
    environment = load_environment(EnvConfig(id="primes:Primes"), seed=0)
    assert (environment.heavy_reward, environment.offloads_to) == (True, "processes")
    example = environment.example(0)
    assert [environment.reward(example, text).reward for text in ("7", "1", "91", "97")] == [1, 0, 0, 1]


def test_the_filter(docs_modules, attempted) -> None:
    docs_modules("write-an-advantage.md")
    config = FilterConfig(import_path="unhurried:finished", kwargs={"max_tokens": 3})
    rollouts = [attempted("abc"), attempted("abcd"), attempted("ab", finish_reason="length")]
    assert load_filter(config)(FilterInputs(rollouts, [0.1, 0.2, -0.3])) == [True, False, False]


def test_the_advantage(docs_modules, attempted) -> None:
    docs_modules("write-an-advantage.md")
    config = CustomAdvantageConfig(type="custom", import_path="ranks:rank_advantage", kwargs={"scale": 0.5})
    function = load_advantage(config).function
    rollouts = [ScoredRollout(reward, [1], 0, "env", "0", "g0") for reward in (1.0, 0.0, 1.0)]
    assert function(AdvantageInputs(rollouts)).advantages == [0.25, -0.5, 0.25]
    brief = CustomAdvantageConfig(type="custom", import_path="brief:brief_advantage", kwargs={"cost": 0.5})
    replies = [attempted("ab"), attempted("abcd")]
    assert load_advantage(brief)(replies) == [0.5, -0.5]


def test_the_tutorial(docs_modules) -> None:
    docs_modules("tutorial.md")
    environment = load_environment(EnvConfig(id="last_letter:LastLetter"), seed=0)
    example = environment.example(3)
    last = example.messages[0]["content"][-1]
    assert [environment.reward(example, text).reward for text in (last, last + "~", "~")] == [1.0, 0.5, 0.0]
    config = CustomAdvantageConfig(type="custom", import_path="harder:harder_first", kwargs={"floor": 0.1})
    rollouts = [ScoredRollout(reward, [1], 0, "env", "0", "g0") for reward in (1.0, 0.5, 0.0, 0.5)]
    assert load_advantage(config).function(AdvantageInputs(rollouts)).advantages == [0.25, 0.0, -0.25, 0.0]


def test_the_loss(docs_modules) -> None:
    docs_modules("write-a-loss.md")
    config = CustomLossConfig(type="custom", import_path="clipped:clipped_loss", kwargs={"high": 0.5})
    logprobs = torch.tensor([0.1, 0.4, 0.9]).log().requires_grad_()
    sampled = torch.tensor([0.1, 0.2, 0.3]).log()
    inputs = LossInputs(
        logprobs,
        sampled,
        torch.ones(3),
        torch.tensor([False, True, True]),
        None,
        Ratios.of(logprobs, sampled),
        [3],
    )
    record = loss_for(config)["rl"](inputs)
    assert record.token_loss.tolist() == pytest.approx([0.0, -1.5, -1.5])
    assert record.is_masked_high.tolist() == [False, True, True]


def test_a_loop_beside(docs_modules, tmp_path, capsys) -> None:
    docs_modules("beside-another-trainer.md")
    weights = torch.zeros(9, requires_grad=True)

    def policy(token_ids: torch.Tensor) -> torch.Tensor:
        return weights.log_softmax(0)[token_ids[:, 1:]]

    def surrogate(logprobs: torch.Tensor) -> torch.Tensor:
        return -((logprobs[:, -2:] - old[:, -2:]).exp() * torch.tensor([[1.0], [-1.0]])).mean()

    ids = torch.tensor([[0, 5, 6, 7], [4, 5, 8, 8]])
    old = policy(ids).detach()
    batch = types.SimpleNamespace(
        token_ids=ids,
        attention_mask=ids > 0,
        completion_mask=torch.ones(2, 2),
        old_logprobs=old,
        advantages=torch.tensor([1.0, -1.0]),
        rewards=torch.tensor([1.0, 0.0]),
        groups="g0",
        loss=surrogate,
    )
    optimizer = torch.optim.SGD([weights], lr=0.01)
    sys.modules["beside"].train(policy, optimizer, [batch] * 3, tmp_path)
    assert pellucid.export.open(tmp_path).steps == (0, 1, 2)
    assert main(["replay", str(tmp_path)]) == 0
    assert "sum of token losses" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["denominator.md", "mismatch.md", "sizing.md", "staleness.md"])
def test_worked_examples_give_what_the_page_says(page, capsys) -> None:
    text = (ROOT / "docs" / page).read_text()
    examples = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert examples
    for code, output in examples:
        exec(compile(code, page, "exec"), {})
        assert capsys.readouterr().out == output


def test_the_second_command_of_the_readme_goes_on_with_the_first() -> None:
    """To the same number of steps: it is the first one and `--resume`."""
    lines = re.findall(r"\$ (pellucid rl .*outputs/mine.*?) *# ", (ROOT / "README.md").read_text())
    assert [line.split() for line in lines] == [lines[0].split(), [*lines[0].split(), "--resume"]]


@pytest.mark.parametrize(
    ("advantage", "delta", "masked"),
    [(1.0, 0.3, "high"), (-1.0, -0.3, "low"), (0.0, -0.3, "neither"), (0.0, 0.3, None), (1.0, -0.3, None)],
)
def test_the_skill_tells_the_trust_region_as_the_loss_has_it(advantage, delta, masked) -> None:
    """A > 0 above, A < 0 below; at A = 0 the lower bound holds, and `is_masked` alone says so."""
    text = (ROOT / "skills" / "pellucid" / "SKILL.md").read_text().replace("\n", " ")
    assert "A > 0 and `prob_delta` > `dppo_mask_high` (`is_masked_high`), or A < 0 and `prob_delta` <" in text
    assert "at A = 0 the lower bound holds, too, and `is_masked` alone says so" in text
    logprobs, inference = torch.tensor([0.5 + delta]).log(), torch.tensor([0.5]).log()
    inputs = LossInputs(
        logprobs,
        inference,
        torch.tensor([advantage]),
        torch.tensor([True]),
        None,
        Ratios.of(logprobs, inference),
        [1],
    )
    record = dppo_loss(inputs, DppoLossConfig())
    found = {"high": record.is_masked_high, "low": record.is_masked_low}
    assert record.is_masked.item() == (masked is not None)
    assert {side: mask.item() for side, mask in found.items()} == {
        "high": masked == "high",
        "low": masked == "low",
    }


@pytest.mark.parametrize(
    ("page", "columns"), [("read-an-export.md", FIELDS), ("wire-format.md", COLUMNS.values())]
)
def test_every_column_and_field_is_in_its_table(page: str, columns: Iterable[Column]) -> None:
    text = (ROOT / "docs" / page).read_text()
    written = runpy.run_path(str(ROOT / "docs" / "tables.py"))["page_with_table"](page)
    assert text == written, "the schema says otherwise: run `python docs/tables.py`"
    assert [column.name for column in columns if f"\n| `{column.name}` | " not in text] == []


def test_the_walks_lead_through_functions_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Four walks")[2].partition("## A new column")[0]
    walks = [
        re.findall(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", walk, re.MULTILINE) for walk in section.split(":\n\n")
    ]
    assert [len(walk) > 3 for walk in walks] == [False, True, True, True, True]
    token = [file for file, _ in walks[1]]
    assert len(token) <= 20
    assert len(set(token)) == len(token)  # no room twice
    for file, name in chain.from_iterable(walks):
        module = import_module(
            "pellucid." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        assert attrgetter(name)(module).__code__.co_filename.endswith(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_security_page_names_every_file_of_a_run_and_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    tests = set(re.findall(r"`(tests/[^`]+\.py)`", page))
    assert len(tests) > 15
    assert [name for name in sorted(tests) if not (ROOT / name).exists()] == []
    table = page.partition("## Files")[2].partition("## What is not covered")[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    missing = [
        name
        for name in (*WRITTEN_BY_A_RUN, LOCK, "runs")
        if not re.search(rf"`{re.escape(name)}\b", first_cells)
    ]
    assert missing == []
