"""Whatever environments, data and models put into a run is carried to its end, or fails its rollout alone."""

import asyncio
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exported_steps import observed
from orchestrator.test_run import (
    Guess,
    configure,
    letters,
    run,
    saved_rollouts,
)
from pellucid.config import EnvConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.data.plain import clip_middle, encodable, printable, to_json, to_plain
from pellucid.export import TokenExporter
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import State
from pellucid.orchestrator import Environment, Score, Session
from pellucid.orchestrator.records import (
    BatchProgress,
    progress_path,
    read_progress,
    sample_line,
    write_progress,
)
from pellucid.orchestrator.scheduler import SchedulerState
from pellucid.orchestrator.snapshot import read_snapshot, take_snapshot, write_snapshot
from pellucid.orchestrator.verdict import Verdict
from pellucid.viewer import terminal
from pellucid.viewer.access import Exports

HALF = "a\ud83db"
ODD = "[bold]x[/] \x1b[2J \u202e \u200b \0 \r\n " + HALF


class Unprintable:
    def __str__(self) -> str:
        raise ZeroDivisionError


def cyclic() -> dict[str, Any]:
    """A tree whose children know their parent; followed blindly, it has 2 ** 50 paths."""
    root: dict[str, Any] = {"children": []}
    root["children"] = [{"parent": root, "name": name} for name in "ab"]
    return root


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD_VALUES: dict[str, Any] = {
    "surrogate": HALF,
    "odd text": ODD,
    "bytes": b"\xff",
    "set": {1},
    "keys": {1: 2, (1, 2): 3, None: 4, HALF: 5},
    "huge": [2**70, 10**5000, -(2**63), 2**64 - 1],
    "floats": [float("nan"), float("inf"), np.float32(1.5), np.longdouble(2)],
    "numpy": [
        np.bool_(True),
        np.int64(3),
        np.arange(3),
        np.array(1.0),
        np.array([{1}], object),
        np.str_("s"),
    ],
    "unprintable": Unprintable(),
    "cyclic": cyclic(),
    "deep": nested(5000),
    "long": "x" * 10_000_000,
}


def test_odd_values_are_plain_and_small() -> None:
    plain = to_plain(ODD_VALUES)
    assert plain["surrogate"] == "a\\ud83db" and plain["bytes"] == "b'\\xff'" and plain["set"] == "{1}"
    assert plain["keys"] == {"1": 2, "(1, 2)": 3, "None": 4, "a\\ud83db": 5}
    assert plain["huge"] == [str(2**70), "<int>", -(2**63), 2**64 - 1]
    assert plain["floats"][1:] == [float("inf"), 1.5, "2.0"]
    assert plain["numpy"] == [True, 3, [0, 1, 2], 1.0, ["{1}"], "s"]
    assert plain["unprintable"] == "<Unprintable>"
    assert plain["cyclic"] == {"children": [{"parent": "…", "name": "a"}, {"parent": "…", "name": "b"}]}
    assert len(plain["long"]) == 10_000_000
    assert orjson.loads(to_json(ODD_VALUES))["floats"] == [None, None, 1.5, "2.0"]
    wide: list[Any] = []
    for _ in range(60):
        wide = [wide, wide]
    assert len(to_json(wide)) < 20_000_000


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.complex_numbers()
    | st.dates()
)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(leaves, inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(anything)
def test_anything_is_plain_once_and_for_all(value: Any) -> None:
    assert orjson.loads(to_json(value)) == orjson.loads(to_json(to_plain(value)))


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 30))
def test_texts_that_are_shown(text: str, width: int) -> None:
    assert encodable(text).encode().decode() == encodable(text) and encodable(encodable(text)) == encodable(
        text
    )
    assert all(each == "\n" or each.isprintable() for each in printable(text))
    assert len(clip_middle(text, width)) <= width


class Odd(Guess):
    """Every example is odd in its own way."""

    def example(self, index: int) -> Example:
        plain = [{"role": "user", "content": "hi"}]
        match index:
            case 0:
                return Example(7, plain)  # type: ignore[arg-type]
            case 1:
                return Example(HALF, [{"role": "user", "content": [{"type": "text", "text": "p"}] * 2}])
            case 2:
                return Example(ODD, [{"role": "user", "content": "hi", "note": ODD_VALUES["cyclic"]}])
            case 3:
                return Example(
                    "x" * 100_000, [*plain, {"role": "assistant", "content": None, 5: {6}}, *plain]
                )
            case 8:
                return Example("half", [{"role": "user", "content": HALF}])
            case 9:
                return Example("image", [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}])
            case 10:
                return Example("empty", [])
            case 11:
                return Example("long", [{"role": "user", "content": "x" * 5000}])
            case 12:
                raise KeyError(ODD)
            case 13:
                sys.exit(3)
            case 24:
                raise KeyboardInterrupt
            case 14:
                return Example("role", [{"role": None, "content": "x"}])
            case _:
                return super().example(index)

    async def rollout(self, example: Example, session: Session) -> Score:
        score = await super().rollout(example, session)
        match example.example_id:
            case "4":
                metrics = {HALF: np.float32(1), ODD: float("nan"), 5: True, "inf": np.inf}
                return Score(np.float64(score.reward), metrics, state=ODD_VALUES)  # type: ignore[arg-type]
            case "5":
                return Score(np.bool_(score.reward > 0.4), state={HALF: 1, "deep": ODD_VALUES["deep"]})  # type: ignore[arg-type]
            case "15":
                return Score(1e300)
            case "16":
                return Score("1")  # type: ignore[arg-type]
            case "17":
                return Score(1j)  # type: ignore[arg-type]
            case "18":
                raise SystemExit(2)
            case "19":
                raise KeyboardInterrupt
            case "20":
                raise asyncio.CancelledError
            case "21":
                raise ValueError(ODD * 1_000)
            case "22":
                return Score(1.0, {"m": 10**400})
            case "23":
                return Score(2**2000)
        return score


def test_each_odd_example_is_carried_or_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {"id": "x:Odd", "name": "odd", "state_columns": list(ODD_VALUES)}
    changes = {
        "max_inflight_rollouts": 8,
        "max_retries": 0,
        "batch_size": 20,
        "filter_zero_advantages": False,
    }
    config = configure(tmp_path, entry, orchestrator=changes, max_steps=4)
    batches = run(config, {"odd": Odd(seed=1)}, FakeInferenceClient(letters))

    records = saved_rollouts(tmp_path)
    by_example: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_example.setdefault(record["example_id"], []).append(record)
    reasons = {
        key: {record["reason"] for record in group if record["outcome"] == "failed_rollout"}
        for key, group in by_example.items()
    }
    failed = {key: found.pop() for key, found in reasons.items() if len(found) == 1}
    here = "tests/orchestrator/test_input.py:"
    expected = {
        encodable(ODD): "RecursionError: ",
        "half": "RolloutError: the prompt has half of a character (a lone surrogate) at 18, in ",
        "image": "RolloutError: the content of messages[0] has the part {'type': 'image_url', 'url': 'x'}",
        "empty": "ValueError: Cannot apply chat template to an empty conversation",
        "long": "PromptTooLongError: the prompt has 50",
        "12": "UserCodeError: environment 'odd' has no example 12: KeyError: ",
        "13": f"UserCodeError: environment 'odd' has no example 13: SystemExit: 3 ({here}",
        "14": f"RolloutError: Odd.example ({here}",
        "15": f"RolloutError: Odd.rollout ({here}",
        "16": f"RolloutError: Odd.rollout ({here}",
        "17": f"RolloutError: Odd.rollout ({here}",
        "18": f"RolloutError: SystemExit: 2 ({here}",
        "19": f"RolloutError: KeyboardInterrupt ({here}",
        "24": f"UserCodeError: environment 'odd' has no example 24: KeyboardInterrupt ({here}",
        "20": f"CancelledError ({here}",
        "21": "ValueError: [bold]x[/] \\x1b[2J \\u202e \\u200b \\x00 \\r\n a\\ud83db[bold]",
        "22": f"RolloutError: Odd.rollout ({here}",
        "23": f"RolloutError: Odd.rollout ({here}",
    }
    assert failed.keys() == expected.keys()
    for key, start in expected.items():
        assert failed[key].startswith(start), (key, failed[key][:200])
        assert len(failed[key]) <= 10_000
    long_id = f"{'x' * 1000}…{sha256(b'x' * 100_000).hexdigest()[:16]}"
    rewarded = {"7", encodable(HALF), long_id, "4", "5", "6"}
    assert rewarded <= by_example.keys() - failed.keys()
    [first, *_] = by_example[encodable(HALF)]
    assert first["messages"] == [{"role": "user", "content": [{"type": "text", "text": "p"}] * 2}]
    [tree, *_] = by_example[encodable(ODD)]
    assert tree["messages"][0]["note"]["children"][0] == {"parent": "…", "name": "a"}
    [valued, *_] = by_example["4"]
    assert valued["metrics"] == {encodable(HALF): 1.0, encodable(ODD): None, "5": 1.0, "inf": None}
    assert valued["surrogate"] == encodable(HALF) and valued["numpy"][:2] == [True, 3]

    assert {each for batch in batches for each in batch.table["example_id"]} >= rewarded
    assert not any("\x1b" in message or "\u202e" in message for message in caplog.messages)

    exporter = TokenExporter(tmp_path)
    for step, batch in enumerate(batches):
        exporter.add(batch.table, observed(batch.table.num_tokens), step=step, micro_step=0, denominator=1)
        exporter.finish(step)
        exporter.mark_stable(step)
    exporter.close()
    console = Console(markup=False, emoji=False, width=100)
    with console.capture() as shown:
        terminal.show(Exports(tmp_path), tokenizer=None, record_index=0, console=console)
    assert "\x1b[2J" not in shown.get() and "odd" in shown.get()


def odd_verdict() -> Verdict:
    completion = Completion([5, 6], [-0.5, -0.25], [(0, 2)], HALF)
    messages = to_plain([{"role": "user", "content": [{"type": "text", "text": ODD}, {"type": "image"}]}])
    turn = Turn([1, 2], completion, ODD * 500, [("user", 0, 2), ("assistant", 2, 4)])
    rollout = Rollout("g0-r0", "g0", Example(encodable(ODD), messages), "env", 1.0, [turn], 0.5)
    return Verdict(rollout, State.REJECTED, encodable(ODD))


def test_odd_rollouts_are_shown_and_saved(tmp_path: Path) -> None:
    verdict = odd_verdict()
    assert sample_line(3, verdict.rollout).isprintable() and len(sample_line(3, verdict.rollout)) <= 100
    state = SchedulerState(1, {}, 1, 0, [], [[verdict]])
    (tmp_path / "checkpoints").mkdir()
    write_snapshot(tmp_path, take_snapshot(state, mark=0, rollouts_bytes={}))
    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None
    [[again]] = snapshot.scheduler_state("run").ready
    assert again.rollout.turns[0].text == encodable(ODD * 500)
    assert again.rollout.stop_reason == encodable(HALF) and again.reason == verdict.reason
    (tmp_path / "metrics").mkdir()
    write_progress(tmp_path, BatchProgress(step=1, num_running=1).add([[verdict]]))
    progress = read_progress(progress_path(tmp_path))
    assert progress is not None and progress.outcomes == {"rejected": 1}


class Mutates(Environment):
    """Appends to the messages it was given, and rewrites one in place before it asks again."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "hi"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        messages: Any = example.messages
        messages.append({"role": "assistant", "content": await session.respond(messages)})
        messages[0]["content"] = "ho"
        messages.append({"role": "user", "content": "so"})
        await session.respond(messages)
        return Score(1.0)


def test_messages_that_are_changed_in_place_are_those_of_one_rollout_and_seen_as_changed(attempt) -> None:
    environment = Mutates(seed=0)
    example = environment.example(0)
    rollout = attempt(environment, example, ["a", "b"])
    assert rollout.error is None and rollout.example.messages == [{"role": "user", "content": "hi"}]
    assert example.messages == [{"role": "user", "content": "hi"}]
    first, second = rollout.turns
    assert not second.extends(first)  # a branch: what it went on from was never said
    opening = len(["<|im_start|>"]) + len("user\n")
    assert first.known_ids[:opening].tolist() == second.known_ids[:opening].tolist()
    assert first.known_ids[opening + 1] != second.known_ids[opening + 1]


class Forms(Environment):
    """Mistakes in the form of a rollout."""

    def __init__(self, form: str) -> None:
        super().__init__(seed=0)
        self.form = form

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "hi"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        messages: Any = {"text": "hi", "str": ["hi"], "no role": [{"content": "hi"}], "none": None}[self.form]
        await session.respond(messages)
        return Score(1.0)


class NotAsync(Forms):
    def rollout(self, example: Example, session: Session) -> Any:  # type: ignore[override]
        return Score(1.0)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (Forms("text"), "TypeError: the messages are 'hi' (str); give a list of dicts"),
        (Forms("str"), "TypeError: messages[0] is 'hi' (str); give a dict such as"),
        (Forms("no role"), "TypeError: messages[0] is {'content': 'hi'} (dict); give a dict such as"),
        (Forms("none"), "TypeError: the messages are None (NoneType); give a list of dicts"),
        (NotAsync(""), "RolloutError: NotAsync.rollout (tests/orchestrator/test_input.py:"),
    ],
)
def test_mistakes_in_form_fail_the_rollout(attempt, environment: Forms, reason: str) -> None:
    rollout = attempt(environment, environment.example(0), ["a"])
    assert rollout.error is not None and rollout.error.startswith(reason), rollout.error


def test_tokens_that_cannot_be_decoded_are_in_the_rollout(attempt) -> None:
    """Of a server that gives what no vocabulary has: counted, and the rollout fails."""
    environment = Guess(seed=0)
    rollout = attempt(environment, environment.example(0), [[5, 2**40]])
    assert rollout.num_sampled == 2
    assert rollout.error.startswith(
        "RolloutError: the tokenizer cannot decode what was sampled: OverflowError"
    )


class TwoTools(Guess):
    async def rollout(self, example: Example, session: Session) -> Score:
        tool = {"type": "function", "function": {"name": "f"}}
        turn = await session.sample(example.messages, tools=[tool, tool])
        return Score(float(len(turn.text)))


def test_two_tools_of_one_name_are_the_template_s_to_render(attempt) -> None:
    environment = TwoTools(seed=0)
    assert attempt(environment, environment.example(0), ["abc"]).reward == 3.0


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "a\nb", "\u202eb", HALF, "all", "x" * 201])
def test_names_are_such_that_metrics_and_files_can_hold_them(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        EnvConfig(id="arithmetic", name=name)


def test_an_id_that_cannot_be_a_name_needs_one() -> None:
    with pytest.raises(ValueError, match=r"set orchestrator\.env\.name"):
        EnvConfig(id="verifiers:group/words")
    assert EnvConfig(id="verifiers:group/words", name="words").label == "words"
