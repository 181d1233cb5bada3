"""What a run says between two batches, and what it saves of each rollout."""

import json
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from pellucid.data import Completion, Example, Rollout, TokenTable, Turn, TurnTrace
from pellucid.ledger import Flow, State
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment, Score, Session
from pellucid.orchestrator.records import (
    BatchProgress,
    progress_path,
    read_progress,
    rollout_record,
    write_progress,
)
from pellucid.orchestrator.snapshot import HeldRollout, HeldTurn
from pellucid.orchestrator.verdict import Outcome, Verdict, build_samples
from seeker import HOSTILE, Seeker, as_call


def verdict(name: str, outcome: Outcome, *, reward: float = 0.0, reason: str = "") -> Verdict:
    return Verdict(Rollout(name, "g0", Example("0", []), "env", 1.0, reward=reward), outcome, reason)


GROUPS = [
    [
        verdict("g0-r0", State.ZERO_ADVANTAGE, reward=0.25),
        verdict("g0-r1", State.ZERO_ADVANTAGE, reward=0.25),
    ],
    [
        verdict("g1-r0", State.FAILED_ROLLOUT, reason="ValueError: no\nanswer"),
        verdict("g1-r1", Flow.SENT, reward=1.0),
        verdict("g1-r2", State.ZERO_ADVANTAGE, reward=1.0),
    ],
    [verdict("g2-r0", State.STALE, reason="too old")],
]


def progress_of(groups: list[list[Verdict]], *, waits_for_weights: bool = False) -> BatchProgress:
    return BatchProgress(7, 12, 1640, waits_for_weights).add(groups)


def test_rollouts_that_do_not_train_are_told_by_reason_with_the_first_failure() -> None:
    assert progress_of(GROUPS).lines() == [
        "step 7: 12 rollouts ready, 1,640 running; do not train: 3 without a signal (equal rewards in a "
        "group, mean 0.500), 1 failed, 1 stale",
        "  the first that failed or was dropped: rollout g1-r0 of env, failed_rollout: ValueError: no answer",
    ]


def test_nothing_is_explained_where_nothing_is_lost() -> None:
    assert progress_of([], waits_for_weights=True).lines() == [
        "step 7: 12 rollouts ready, 1,640 running; waits for newer weights"
    ]


def test_nothing_is_said_before_the_first_rollout_starts() -> None:
    assert BatchProgress(step=0, num_ready=0, num_running=0).lines() == []


def test_what_is_written_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = progress_path(tmp_path)
    assert read_progress(path) is None
    progress = progress_of(GROUPS)
    write_progress(tmp_path, progress)
    assert read_progress(path) == progress
    path.write_bytes(b"{")
    assert read_progress(path) is None


# Conversations


def saved(rollout: Rollout, outcome: Outcome = Flow.SENT) -> dict[str, Any]:
    """A rollout as its line in the file says it, without times."""
    record = json.loads(orjson.dumps(rollout_record(0, Verdict(rollout, outcome), {"temperature": 1.0})))
    for turn in record["trajectory"]:
        assert 0 <= turn.pop("wait_s") < 10 and 0 <= turn.pop("start_s", 0) < 10
    return record


def test_turns_are_saved_by_what_they_add(attempt) -> None:
    environment = Seeker(seed=0)
    rollout = attempt(environment, environment.example(0), ["one", "three", "eio", "no"])
    record = saved(rollout)
    assert (record["schema"], record["reward"]) == (2, pytest.approx(0.8))
    assert record["metrics"] == {"vowels": 0.3, "brief": 1.0, "judged": 2.0}
    assert record["weights"] == {"vowels": 1.0, "brief": 0.5}
    first, second, third, fourth = record["trajectory"]
    told = ("text", "num_prompt_tokens", "num_tokens", "finish_reason", "policy_versions")
    own = [{name: turn[name] for name in turn if name not in told} for turn in record["trajectory"]]
    results = [f"{number}: {size} letters {HOSTILE}" for number, size in enumerate((3, 5))]
    queries = [as_call(turn)["tool_calls"][0]["function"]["arguments"] for turn in rollout.turns[:2]]
    assert own == [
        {"tool_calls": [{"id": "call_0", "name": "search", "arguments": queries[0]}]},
        {
            "messages": [{"role": "tool", "tool_call_id": "call_0", "content": results[0]}],
            "tool_calls": [{"id": "call_0", "name": "search", "arguments": queries[1]}],
        },
        # The summary replaces what follows the first two messages of the conversation of turn 1.
        {
            "keeps": 2,
            "messages": [{"role": "user", "content": f"So far: {'; '.join(results)}"}],
            "sample": 1,
        },
        {
            "after": -1,
            "keeps": 0,
            "messages": [{"role": "user", "content": "Is 'eio' right?"}],
            "sample": 2,
            "trainable": False,
        },
    ]
    assert [turn["text"] for turn in (first, second, third, fourth)] == ["one", "three", "eio", "no"]


def test_the_tokens_of_a_turn_are_where_its_record_says(attempt) -> None:
    environment = Seeker(seed=0)
    rollout = attempt(environment, environment.example(0), ["one", "three", "eio", "no"])
    samples = TokenTable.from_samples(build_samples(rollout, run_id="run", advantage=1.0))
    tokenizer = character_tokenizer()
    sample = 0
    for turn in saved(rollout)["trajectory"]:
        sample = turn.get("sample", sample)
        start = int(samples.token_offsets[sample]) + turn["num_prompt_tokens"]
        span = slice(start, start + turn["num_tokens"])
        end = "<|im_end|>" if turn["finish_reason"] == "stop" else ""
        assert tokenizer.decode(samples["token_ids"][span].tolist()) == f"{turn['text']}{end}"
        assert samples["sampled"][span].all()
        assert samples["loss_mask"][span].all() == turn.get("trainable", True)


class Asks(Environment):
    """Shows the model these conversations in turn; a `*` stands for the reply to the one of that number."""

    def __init__(self, *conversations: str) -> None:
        super().__init__(seed=0)
        self._conversations = conversations

    def example(self, index: int) -> Example:
        return Example("0", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        replies: list[str] = []
        for conversation in self._conversations:
            messages = [
                {"role": "assistant", "content": replies[int(letter)]}
                if letter.isdecimal()
                else {"role": "user", "content": letter}
                for letter in conversation
            ]
            replies.append(await session.respond(messages))
        return Score(1.0)


@pytest.mark.parametrize(
    ("conversations", "after", "keeps", "added", "samples"),
    [
        (("ab", "ab0c", "ab0c1d"), [-1, 0, 1], [None] * 3, ["", "c", "d"], [0, 0, 0]),
        (("ab", "ab0c", "ab0d"), [-1, 0, 0], [None] * 3, ["", "c", "d"], [0, 0, 1]),  # a tree
        (("ab", "ab", "ab"), [-1, -1, -1], [None] * 3, ["", "", ""], [0, 1, 2]),  # best of three
        (("ab", "ab0c", "abd"), [-1, 0, 1], [None, None, 2], ["", "c", "d"], [0, 0, 1]),  # compaction
        (("ab", "ab0c", "ad"), [-1, 0, 1], [None, None, 1], ["", "c", "d"], [0, 0, 1]),
        (("ab", "ab0c", "ab0d", "ab0c1e"), [-1, 0, 0, 1], [None] * 4, ["", "c", "d", "e"], [0, 0, 1, 0]),
        (
            ("a", "a0b", "x"),
            [-1, 0, -1],
            [1, None, 0],
            ["", "b", "x"],
            [0, 0, 1],
        ),  # not as the example has it
    ],
)
def test_what_a_turn_goes_on_from(attempt, conversations, after, keeps, added, samples) -> None:
    environment = Asks(*conversations)
    replies = [f"reply {number}" for number in range(len(conversations))]
    rollout = attempt(environment, environment.example(0), replies)
    assert rollout.error is None
    traces = [turn.trace for turn in rollout.turns]
    assert [trace.after for trace in traces] == after
    assert [trace.keeps for trace in traces] == keeps
    texts = [[each["content"] for each in json.loads(trace.messages_json or "[]")] for trace in traces]
    assert texts == [list(letters) for letters in added]
    assert [turn.sample for turn in rollout.turns] == samples


def test_long_messages_are_kept_deflated_and_saved_whole() -> None:
    trace = TurnTrace()
    trace.set_messages([{"role": "tool", "content": "x" * 100_000}])
    assert len(trace.messages) < 1000
    assert json.loads(trace.messages_json) == [{"role": "tool", "content": "x" * 100_000}]


def test_times_are_those_of_the_engine_and_of_the_environment() -> None:
    """Less than 50 ms outside of the engine is left out, but never adds up."""
    starts = (0.02, 1.56, 3.25, 4.78, 6.31, 7.85, 7.0)
    turns = [
        Turn(
            [5],
            Completion([6], [-1.0], [(0, 1)], "stop"),
            "x",
            trace=TurnTrace(number - 1, start_s=start, wait_s=1.5),
        )
        for number, start in enumerate(starts)
    ]
    rollout = Rollout("g0-r0", "g0", Example("0", []), "env", 1.0, turns, reward=1.0, time_s=9.5)
    rollout.number_samples()
    record = rollout_record(0, Verdict(rollout, Flow.SENT), {})
    assert [turn["wait_s"] for turn in record["trajectory"]] == [1.5] * 7
    # A turn without its own starts when the one before ends: at 0, 4.75 and 7.81. The last runs beside it.
    own = [turn.get("start_s") for turn in record["trajectory"]]
    assert own == [None, 1.56, 3.25, None, 6.31, None, 7.0]
    assert record["time_s"] == 9.5  # a second after the last turn: the reward
    rollout.time_s = 8.54
    assert "time_s" not in rollout_record(0, Verdict(rollout, Flow.SENT), {})


def test_a_rollout_that_waits_in_a_snapshot_is_saved_as_it_would_have_been(attempt) -> None:
    environment = Seeker(seed=0)
    rollout = attempt(environment, environment.example(0), ["one", "three", "eio", "no"])
    verdict = Verdict(rollout, Flow.SENT, "", 0.5, build_samples(rollout, run_id="run", advantage=0.5))
    before = orjson.dumps(rollout_record(3, verdict, {}))
    rollout.forget_tokens()
    held = msgspec.msgpack.decode(msgspec.msgpack.encode(HeldRollout.of(verdict)), type=HeldRollout)
    assert orjson.dumps(rollout_record(3, held.verdict("run"), {})) == before


def test_a_turn_of_an_older_snapshot_opens() -> None:
    old = msgspec.msgpack.encode(["hi", 3, 1, "stop", [[0, 1]], [["user", 0, 3]], "a:b"])
    turn = Turn.without_tokens(**msgspec.structs.asdict(msgspec.msgpack.decode(old, type=HeldTurn)))
    assert (turn.text, turn.trainable, turn.sample, turn.trace) == ("hi", True, None, TurnTrace())
    rollout = Rollout("g0-r0", "g0", Example("0", []), "env", 1.0, [turn, turn], reward=1.0)
    saved = rollout_record(0, Verdict(rollout, Flow.SENT), {})
    assert saved["schema"] == 1, "nobody knows any more which messages the second turn added"
