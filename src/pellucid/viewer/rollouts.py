"""The saved rollouts of a run, `rollouts/step_N/*_rollouts.jsonl`: dropped ones, too, which no export has.

A row per rollout: what became of it and why, its reward, and its conversation. `messages` has every message
once, in the order in which they came about; `turns` says how they belong together:

    messages   system user | reply | tool  reply | summary  reply
    turns                    0       1             2
               first         2       3             5                the first message that the turn adds
               reply         2       4             6
               after        -1       0             1                the turn whose conversation it starts with
               keeps                               2                … of which it keeps so many messages

The conversation of a turn is what it keeps, then its messages from `first` to `reply`. Files of older runs
have no messages but the example's and the replies. Dumps of other systems (`export.foreign`) come out in the
same rows.

Long texts are shortened, and say so: to `MAX_TEXT` characters each, and further if all texts of a step would
exceed a total. `row` has one rollout with longer ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.data.files import step_folders
from pellucid.data.plain import to_json
from pellucid.errors import DataError, PellucidError
from pellucid.export.dumps import Dump, find_dump
from pellucid.export.foreign import as_rollouts, format_of, number_in
from pellucid.export.jsonl import read_json_lines

MAX_TEXT = 20_000
"""Characters of a message in a list of rollouts; the middle of a longer one is left out."""

MAX_STEP_TEXT = 32_000_000
"""Characters of all messages in a list of rollouts."""

MAX_LONG_TEXT = 1_000_000
"""Characters of a message, where one rollout is read alone."""

_MIN_TEXT = 40

MAX_ROLLOUTS = 20_000
"""Rollouts of one step that are shown."""

_USED, _ALL = "effective", "all"
_FILES = (
    *("train_rollouts.jsonl", "eval_rollouts.jsonl"),
    *(f"{kind}/{which}/traces.jsonl" for which in (_USED, _ALL) for kind in ("train", "eval")),
)
"""prime-rl's traces come last: those that went into a batch, then all of them, the former again."""

_WORDS = {
    "rollout": "rollout_id",
    "group": "group_id",
    "example": "example_id",
    "env": "env_name",
    "outcome": "outcome",
    "reason": "reason",
    "error": "error",
    "stop": "stop_reason",
}
_NUMBERS = {"reward": "reward", "advantage": "advantage", "tokens": "num_tokens", "time": "time_s"}


class SavedRollouts:
    def __init__(self, run_dir: Path | None, seq_len: int | None = None, dump: Dump | None = None) -> None:
        """`seq_len`: a rollout that is sent and longer was truncated; `dump`: read instead of a run."""
        self._dump = dump
        self._folder = None if run_dir is None else run_dir / "rollouts"
        self._seq_len = seq_len
        self._counted: dict[int, tuple[object, Counter[str]]] = {}

    def steps(self) -> dict[int, list[Path]]:
        """Returns the files of every step that has some; links that lead out of the run are not followed."""
        if self._dump is not None:
            return self._dump.steps()
        if self._folder is None:
            return {}
        found = {step: _files_of(folder) for step, folder in sorted(step_folders(self._folder).items())}
        return {step: paths for step, paths in found.items() if paths}

    def state(self) -> tuple[object, ...]:
        """Changes whenever a rollout was saved. Only the last steps are written to."""
        steps = self.steps()
        last = [path for paths in list(steps.values())[-8:] for path in paths]
        return len(steps), *map(stamp_of, last)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns the number of rollouts by step and outcome; reads only files that changed."""
        if self._dump is not None:
            return {str(step): dict(outcomes) for step, outcomes in self._dump.outcomes().items()}
        found = {}
        for step, paths in self.steps().items():
            stamp = tuple(map(stamp_of, paths))
            if step not in self._counted or self._counted[step][0] != stamp:
                self._counted[step] = (
                    stamp,
                    Counter(state for _, record in self._records(step) for state in self._states(record)),
                )
            found[str(step)] = dict(self._counted[step][1])
        return found

    def attempts(self, step: int) -> list[tuple[str, str, float | None]]:
        """Returns (environment, example, reward) of every rollout of a step that names its example."""
        return [
            (_text(record.get("env_name")), _text(record["example_id"]), number_in(record.get("reward")))
            for _, record in self._records(step)
            if record.get("example_id") is not None
        ]

    def rows(self, step: int, max_text: int = MAX_STEP_TEXT) -> list[dict[str, Any]]:
        """Returns the rollouts of a step, with up to `max_text` characters of their messages; lines that are
        no rollout are left out."""
        rows: list[dict[str, Any]] = []
        limit, size = MAX_TEXT, 0
        for number, record in self._records(step):
            rows.append(self._row(step, record) | {"number": number})
            size += _clip_row(rows[-1], limit)
            while size > max_text and limit > _MIN_TEXT:
                limit //= 2
                size = sum(_clip_row(row, limit) for row in rows)
        return [_finished(row) for row in rows]

    def row(self, step: int, number: int) -> dict[str, Any]:
        """Returns one rollout, by its `number`, with messages of up to `MAX_LONG_TEXT` characters."""
        for each, record in self._records(step):
            if each == number:
                row = self._row(step, record) | {"number": number}
                _clip_row(row, MAX_LONG_TEXT)
                return _finished(row)
        raise DataError(f"step {step} has no saved rollout {number}")

    def _records(self, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields every saved rollout of a step with its number; a file that cannot be read ends early."""
        if self._dump is not None:
            with suppress(PellucidError, OSError):
                yield from islice(enumerate(self._dump.rollouts(step)), MAX_ROLLOUTS)
            return
        folder = None if self._folder is None else step_folders(self._folder).get(step)
        known: set[str] = set()
        files = [] if folder is None else _files_of(folder)
        found = chain.from_iterable(_saved_in(path, known) for path in files)
        yield from islice(enumerate(found), MAX_ROLLOUTS)

    def lacks(self) -> str:
        """Says what dumps of another system do not hold; empty for pellucid's own rollouts."""
        if self._dump is not None:
            return self._dump.lacks
        last = next(iter(reversed(self.steps().values())), [])
        dump = find_dump(last[-1]) if last else None
        return "" if dump is None else dump.lacks

    def _num_truncated(self, record: Mapping[str, Any]) -> int:
        if record.get("outcome") != "sent" or self._seq_len is None:
            return 0
        lengths = (_whole(turn, "num_prompt_tokens") + _whole(turn, "num_tokens") for turn in _turns(record))
        return max(0, max(lengths, default=0) - self._seq_len)

    def _states(self, record: Mapping[str, Any]) -> Iterator[str]:
        yield _text(record.get("outcome")) or "unknown"
        if self._num_truncated(record):
            yield "truncated"

    def _row(self, step: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a row whose messages have their texts whole; see `_finished`."""
        messages = list(_messages(_list(record, "messages")))
        turns: list[dict[str, Any]] = []
        for turn in _turns(record):
            first = len(messages)
            messages += _messages(_list(turn, "messages"))
            messages.append(_reply(turn))
            turns.append(_turn(turns, turn, first, len(messages) - 1))
        versions = [version for turn in turns for version, _ in turn["versions"]]
        return {
            "step": step,
            **{name: _text(record.get(key)) for name, key in _WORDS.items()},
            **{name: number_in(record.get(key)) for name, key in _NUMBERS.items()},
            "truncated": self._num_truncated(record),
            "version": min(versions, default=None),
            "messages": messages,
            "turns": turns,
            "isConversation": _whole(record, "schema") >= 2,
            "metrics": _numbers(record.get("metrics")),
            "weights": _numbers(record.get("weights")),
            "extra": {
                str(name)[:MAX_TEXT]: _text(text) for name, text in _mapping(record.get("extra")).items()
            },
        }


def _saved_in(path: Path, known: set[str]) -> Iterator[dict[str, Any]]:
    """Yields the rollouts of a file, and adds them to the `known` ones.

    Of prime-rl's traces of all rollouts, known ones are left out; the others were not used.
    """
    with suppress(PellucidError, OSError):
        for _, record in read_json_lines(path, report=lambda _: None):
            if not isinstance(record, dict):
                continue
            for rollout in [record] if format_of(record) is None else as_rollouts(record):
                identity = str(rollout.get("rollout_id"))
                if path.parent.name == _ALL:
                    if identity in known:
                        continue
                    if rollout.get("outcome") == "sent":
                        rollout["outcome"] = "unused"
                known.add(identity)
                yield rollout


class _Clipped(NamedTuple):
    """A text without its middle."""

    head: str
    num_left_out: int = 0
    tail: str = ""

    def clip(self, limit: int) -> "_Clipped":
        size = len(self.head) + len(self.tail)
        if size <= limit:
            return self
        half = limit // 2
        text = self.head + self.tail
        return _Clipped(text[:half], self.num_left_out + size - 2 * half, text[size - half :])

    def __str__(self) -> str:
        if not self.num_left_out:
            return self.head
        return f"{self.head}\n… {self.num_left_out:,} characters are left out …\n{self.tail}"


def _clip_row(row: dict[str, Any], limit: int) -> int:
    """Shortens the messages of a row; returns their characters."""
    size = 0
    for message in row["messages"]:
        message["text"] = message["text"].clip(limit)
        calls = [(name, arguments.clip(limit), key) for name, arguments, key in message.get("calls", ())]
        if calls:
            message["calls"] = calls
        size += sum(
            len(text.head) + len(text.tail) for text in (message["text"], *(each[1] for each in calls))
        )
    return size


def _finished(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with texts in place of clipped ones; `cut` says whether something is left out."""
    texts = [
        text for each in row["messages"] for text in (each["text"], *(a for _, a, _ in each.get("calls", ())))
    ]
    for message in row["messages"]:
        message["text"] = str(message["text"])
        if "calls" in message:
            message["calls"] = [(name, str(arguments), key) for name, arguments, key in message["calls"]]
    return row | {"cut": any(text.num_left_out for text in texts)}


def _files_of(folder: Path) -> list[Path]:
    """Returns the files of a step's folder, `RUN/rollouts/step_N`, that lie in the run."""
    home = folder.parent.parent.resolve()
    return [path for name in _FILES if _is_within(path := folder / name, home)]


def _is_within(path: Path, home: Path) -> bool:
    with suppress(OSError, RuntimeError):  # a link in a circle
        return path.is_file() and path.resolve().is_relative_to(home)
    return False


def _messages(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            words = {"name": message.get("name"), "id": message.get("tool_call_id")}
            yield {
                "role": _text(message.get("role")),
                "text": _Clipped("\n".join(map(_whole_text, texts))),
                **{name: _text(word) for name, word in words.items() if word is not None},
                **_calls(message),
            }


def _reply(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "text": _Clipped(_whole_text(turn.get("text"))), **_calls(turn)}


def _calls(message: Mapping[str, Any]) -> dict[str, list[tuple[str, _Clipped, str]]]:
    """Returns `calls`: (name, arguments, id) of each tool call, in OpenAI's form or without `function`."""
    calls = []
    for call in _list(message, "tool_calls"):
        if isinstance(call, dict):
            function = call["function"] if isinstance(call.get("function"), dict) else call
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else to_json(arguments).decode()
            calls.append((_text(function.get("name")), _Clipped(text), _text(call.get("id"))))
    return {"calls": calls} if calls else {}


def _turn(before: list[dict[str, Any]], turn: Mapping[str, Any], first: int, reply: int) -> dict[str, Any]:
    """Returns a turn with the defaults filled in; docs/write-an-environment.md has them."""
    number = len(before)
    after, keeps = turn.get("after"), turn.get("keeps")
    spans = [span for span in _list(turn, "policy_versions") if isinstance(span, list) and len(span) == 2]
    known = before[-1]["sample"] if before else 0
    start, wait = number_in(turn.get("start_s")), number_in(turn.get("wait_s"))
    end = (before[-1]["start"] or 0) + (before[-1]["wait"] or 0) if before else 0
    return {
        "first": first,
        "reply": reply,
        "after": after if type(after) is int and -1 <= after < number else number - 1,
        "keeps": keeps if type(keeps) is int and keeps >= 0 else None,
        "prompt": _whole(turn, "num_prompt_tokens"),
        "tokens": _whole(turn, "num_tokens"),
        "stop": _text(turn.get("finish_reason")),
        "versions": [span for span in spans if all(type(value) is int for value in span)],
        "sample": sample if type(sample := turn.get("sample", known)) is int else None,
        "trains": turn.get("trainable") is not False,
        "start": None if wait is None else end if start is None else start,
        "wait": wait,
    }


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    numbers = {str(name)[:MAX_TEXT]: number_in(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [turn for turn in _list(record, "trajectory") if isinstance(turn, dict)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _whole(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    return value if type(value) is int else 0


def _whole_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def _text(value: Any) -> str:
    return str(_Clipped(_whole_text(value)).clip(MAX_TEXT))


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Returns time of change and size, which differ once a file was written to; None without a file."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None
