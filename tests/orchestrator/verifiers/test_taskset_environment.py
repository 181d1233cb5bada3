"""Tasksets played by verifiers itself, against scripted replies."""

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("verifiers")

from pellucid.config import EnvConfig, EvalConfig
from pellucid.data import TokenTable
from pellucid.data.tokenizer import CHATML
from pellucid.errors import ConfigError
from pellucid.inference.client import Account
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment, load_environment
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import check_environment
from pellucid.orchestrator.group import GroupRun, load_evaluation
from pellucid.orchestrator.records import rollout_record
from pellucid.orchestrator.session import Sampler
from pellucid.orchestrator.verdict import Verdict, build_samples

TASKSETS = Path(__file__).parent / "tasksets"
TOKENIZER = character_tokenizer()


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path of this process, and of the tool servers that verifiers starts."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), os.environ.get("PYTHONPATH", "")]))


def taskset(name: str, seed: int = 0, **args: Any) -> Environment:
    return load_environment(EnvConfig(id=f"verifiers:{name}", args=args), seed=seed)


def test_rewards_metrics_and_state(attempt) -> None:
    environment = taskset("shout-tasks", words=["hi"])
    example = environment.example(0)
    columns = ["heard", "stop_condition", "info", "task"]
    rollout = attempt(environment, example, ["HI"], state_columns=columns)
    assert example.messages == [
        {"role": "system", "content": "Shout."},
        {"role": "user", "content": "hi"},
    ]
    assert rollout.error is None
    assert rollout.reward == 2.0
    assert rollout.metrics == {"exact": 1.0, "long_enough": 0.0, "letters": 2.0}
    assert rollout.weights == {"exact": 2.0, "long_enough": 1.0}
    state = {column: json.loads(text) for column, text in rollout.state.items()}
    assert (state["heard"], state["stop_condition"], state["task"]["answer"]) == (
        "HI",
        "agent_completed",
        "HI",
    )


def test_what_a_reward_sees_is_what_trains(attempt) -> None:
    environment = taskset("shout-tasks", words=["hi"])
    rollout = attempt(environment, environment.example(0), ["HO!"], state_columns=["info"])
    [sample] = build_samples(rollout, run_id="run", advantage=1.0)
    table = TokenTable.from_samples([sample])
    [(token_ids, sampled, logprobs)] = json.loads(rollout.state["info"])["seen_tokens"]
    assert token_ids == table["token_ids"].tolist()
    assert sampled == table["sampled"].tolist() == table["loss_mask"].tolist()
    seen = [logprob for logprob, is_sampled in zip(logprobs, sampled, strict=True) if is_sampled]
    assert seen == pytest.approx(table["inference_logprobs"].tolist())
    assert TOKENIZER.decode([t for t, s in zip(token_ids, sampled, strict=True) if s]) == "HO!<|im_end|>"


def test_a_finite_taskset_is_shuffled_anew_in_every_pass() -> None:
    words = list("abcdefgh")
    environment = taskset("shout-tasks", words=words)
    stream = [environment.example(index).messages[-1]["content"] for index in range(24)]
    passes = [stream[:8], stream[8:16], stream[16:]]
    assert all(sorted(each) == words for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    again = taskset("shout-tasks", words=words)
    assert [again.example(index).messages[-1]["content"] for index in (17, 3, 23)] == [
        stream[index] for index in (17, 3, 23)
    ]
    other = taskset("shout-tasks", seed=1, words=words)
    assert [other.example(index).messages[-1]["content"] for index in range(24)] != stream


def test_an_infinite_taskset_is_read_in_its_order_also_backwards() -> None:
    environment = taskset("shout-tasks", words=["a", "b", "c"], endless=True)
    examples = [environment.example(index) for index in (0, 1, 7, 4)]
    assert [example.messages[-1]["content"] for example in examples] == ["a", "b", "b", "b"]
    assert [example.example_id for example in examples] == ["0", "1", "7", "4"]


def test_an_evaluation_cannot_ask_for_more_tasks_than_there_are() -> None:
    config = EvalConfig(id="verifiers:shout-tasks", num_examples=3)
    words = [example.messages[-1]["content"] for example in load_evaluation(config, 0).examples]
    assert sorted(words) == ["hey", "hi", "ho"]
    with pytest.raises(ConfigError, match=r"eval\.num_examples = 4, but .*has only 3 different ones; lower"):
        load_evaluation(config.model_copy(update={"num_examples": 4}), 0)
    endless = config.model_copy(update={"num_examples": 4, "args": {"endless": True}})
    assert len(load_evaluation(endless, 0).examples) == 4


def test_a_selection() -> None:
    environment = taskset("shout-tasks", words=list("abcd"), select={"include": {"idx": ["1:3"]}})
    assert {environment.example(index).messages[-1]["content"] for index in range(9)} == {"b", "c"}


def test_a_seat_that_does_not_train_and_a_conversation_that_goes_on(attempt) -> None:
    """With a tokenizer that would merge what the model wrote in two tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["be"])
    because = [*TOKENIZER.encode("because", add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.encode("because", add_special_tokens=False) != because[:-1]
    environment = taskset("debate-tasks")
    rollout = attempt(
        environment,
        environment.example(0),
        [because, "sure", "yes"],
        tokenizer=tokenizer,
        state_columns=["info"],
    )
    assert (rollout.error, rollout.reward, rollout.metrics) == (None, 1.0, {"won": 1.0})
    player, judge = build_samples(rollout, run_id="run", advantage=1.0)
    table = TokenTable.from_samples([player])
    blocks: list[tuple[str | list[int], bool]] = [
        ("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n", False),
        (because, True),
        ("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", False),
        ("sure<|im_end|>", True),
    ]
    expected = [
        (token, trains)
        for block, trains in blocks
        for token in (tokenizer.encode(block, add_special_tokens=False) if isinstance(block, str) else block)
    ]
    assert list(zip(table["token_ids"].tolist(), table["loss_mask"].tolist(), strict=True)) == expected
    assert json.loads(rollout.state["info"])["branches"] == [table["token_ids"].tolist()]
    assert (judge.num_sampled, judge.num_trainable) == (4, 0)
    assert rollout.num_sampled == player.num_sampled + judge.num_sampled


def test_two_agents_that_train_are_refused(attempt) -> None:
    environment = taskset("debate-tasks", env={"both_train": True})
    rollout = attempt(environment, environment.example(0), ["a", "b", "yes"])
    assert rollout.error is not None
    assert "2 trainable agents ['player', 'judge']" in rollout.error
    assert rollout.num_sampled == 2 + 2 + 4


TOOLS_CHATML = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")
def test_tools_are_called_and_what_they_say_is_context(attempt) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    unknown = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    environment = taskset("weather-tasks")
    rollout = attempt(
        environment,
        environment.example(0),
        [unknown, call, "it is 12"],
        tokenizer=character_tokenizer(TOOLS_CHATML),
    )
    assert (rollout.error, rollout.reward, rollout.metrics) == (None, 1.0, {"right": 1.0, "calls": 2.0})
    [sample] = build_samples(rollout, run_id="run", advantage=1.0)
    table = TokenTable.from_samples([sample])
    text = TOKENIZER.decode(table["token_ids"].tolist())
    assert '"name": "weather"' in text.partition("<|im_end|>")[0]  # the tools are in the prompt
    opening = "<|im_start|>assistant\n"
    assert text.endswith(
        f"<|im_start|>user\nOslo?<|im_end|>\n{opening}{unknown}<|im_end|>\n"
        f"<|im_start|>tool\nerror: there is no tool 'time'<|im_end|>\n{opening}{call}<|im_end|>\n"
        f"<|im_start|>tool\n12 degrees in Oslo<|im_end|>\n{opening}it is 12<|im_end|>"
    )
    trained = TOKENIZER.decode(table["token_ids"][table["loss_mask"]].tolist())
    assert trained == f"{unknown}<|im_end|>{call}<|im_end|>it is 12<|im_end|>"
    record = json.loads(orjson.dumps(rollout_record(0, Verdict(rollout, Flow.SENT), {})))
    assert record["weights"] == {"right": 1.0}
    first, second, third = record["trajectory"]
    assert first["tool_calls"] == [{"id": "call_0", "name": "time", "arguments": {}}]
    assert second["tool_calls"] == [{"id": "call_0", "name": "weather", "arguments": {"city": "Oslo"}}]
    assert "messages" not in first and "tool_calls" not in third
    said = [
        (each["role"], each["tool_call_id"], each["content"])
        for turn in (second, third)
        for each in turn["messages"]
    ]
    assert said == [
        ("tool", "call_0", "error: there is no tool 'time'"),
        ("tool", "call_0", "12 degrees in Oslo"),
    ]
    assert not {"after", "keeps", "sample", "trainable"} & (first.keys() | second.keys() | third.keys())


@pytest.mark.parametrize(
    ("args", "replies", "kind", "reason"),
    [
        ({}, ["crash"], "TaskError", "ZeroDivisionError: no score for this"),
        (
            {"env": {"agent": {"sampling": {"temperature": 0.5}}}},
            [],
            "ProviderError",
            "asks for temperature = 0.5; a run samples with temperature = 1.0 and nothing else",
        ),
        (
            {"env": {"agent": {"sampling": {"top_p": 1.0, "stop": ["x"]}}}},
            [],
            "ProviderError",
            "asks for stop = ['x']; a run samples",
        ),
        (
            {"env": {"agent": {"timeout": {"scoring": 0.01}}}},
            ["slow"],
            "RolloutError",
            "the scoring of exact, long_enough did not finish (scoring_timeout)",
        ),
        ({"words": ["x" * 3000]}, [], "ProviderError", "prompt is too long: the prompt has 30"),
        ({}, ["HI"], "ProviderError", "injected failure after 3 tokens"),
    ],
)
def test_failures_are_those_of_verifiers_and_fail_the_rollout_alone(
    attempt, caplog, args, replies, kind, reason
) -> None:
    caplog.set_level(logging.WARNING)
    environment = taskset("shout-tasks", **{"words": ["hi"], **args})
    server_fails = reason.startswith("injected")
    rollout = attempt(environment, environment.example(0), replies, server_fails=server_fails)
    assert rollout.error_type == kind
    assert rollout.error is not None and reason in rollout.error
    assert rollout.num_sampled == (0 if server_fails else sum(len(reply) + 1 for reply in replies))
    assert caplog.text == ""  # it is logged where the run sees it, once


def test_an_attempt_that_verifiers_repeats_is_accounted_for_but_does_not_train(attempt) -> None:
    environment = taskset("shout-tasks", words=["hi"], env={"agent": {"retries": {"max_retries": 1}}})
    rollout = attempt(environment, environment.example(0), ["crash", "HI"])
    assert (rollout.error, rollout.reward) == (None, 2.0)
    assert [(turn.text, turn.trainable) for turn in rollout.turns] == [("crash", False), ("HI", True)]
    first, second = build_samples(rollout, run_id="run", advantage=1.0)
    assert (first.num_sampled, first.num_trainable) == (6, 0)
    assert (second.num_sampled, second.num_trainable) == (3, 3)


def test_limits_of_verifiers_end_an_episode_in_good_order(attempt) -> None:
    environment = taskset("debate-tasks", env={"player": {"max_turns": 1}})
    rollout = attempt(environment, environment.example(0), ["because", "yes"])
    assert (rollout.error, rollout.reward, len(rollout.turns)) == (None, 1.0, 2)


def test_a_cancelled_episode_loses_no_token() -> None:
    client = FakeInferenceClient(lambda prompt_ids, generator: [50] * 40, delay_s=lambda generator: 20.0)
    chat = ChatTemplate(TOKENIZER)
    environment = taskset("shout-tasks")

    async def cancel_half_way() -> Counter[str]:
        async with environment.serving():
            sampler = Sampler(client, chat, "run", 0, 1.0, 100, 2000)
            example = environment.example(0)
            group = GroupRun("g0", "shout", environment, example, 8, sampler, 60.0)
            rollouts = [group.open_rollout(f"g0-r{number}") for number in range(8)]
            attempts = [asyncio.create_task(group.attempt(rollout)) for rollout in rollouts]
            while client.sampled.total() < 8:
                await asyncio.sleep(0.01)
            for each in attempts:
                each.cancel()
            await asyncio.wait(attempts)
        assert client.num_running == 0
        return Counter({rollout.rollout_id: rollout.num_sampled for rollout in rollouts})

    recorded = asyncio.run(cancel_half_way())
    assert recorded.total() == client.sampled[Account("run", "shout")] == client.delivered.total() >= 8


@pytest.mark.parametrize(
    ("env_id", "args", "complaint"),
    [
        (
            "verifiers:no-such-tasks",
            {},
            r"orchestrator\.env\.id = 'verifiers:no-such-tasks' cannot be imported: taskset 'no-such-tasks' "
            r"not found .*PYTHONPATH",
        ),
        (
            "verifiers:shout-tasks",
            {"words": 3},
            r"refuses orchestrator\.env\.args = \{'words': 3\}: taskset\.words = 3: Input should be a valid",
        ),
        (
            "verifiers:shout-tasks",
            {"word": ["hi"]},
            r"taskset\.word = \['hi'\]: Extra inputs are not permitted",
        ),
        (
            "verifiers:shout-tasks",
            {"words": []},
            r"no task is left; check the taskset's own args and `select`",
        ),
        (
            "verifiers:shout-tasks",
            {"select": {"limit": 0}},
            r"limit = 0: Input should be greater than or equal",
        ),
    ],
)
def test_wrong_entries_are_explained(env_id: str, args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment(EnvConfig(id=env_id, args=args), seed=0)


def test_without_the_library_the_entry_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvConfig(id="verifiers:shout-tasks")
    check_environment(config)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    for check in (check_environment, lambda config: load_environment(config, 0)):
        with pytest.raises(
            ConfigError, match=r"needs the verifiers library.*pip install 'pellucid\[verifiers\]'"
        ):
            check(config)
