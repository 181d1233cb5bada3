"""The saved rollouts of a run, `rollouts/step_N/*_rollouts.jsonl`: dropped ones, too, which no export has.

A row per rollout: what became of it and why, its reward, and its texts. Long texts are shortened, and say so.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pellucid.data.files import step_folders
from pellucid.errors import PellucidError
from pellucid.export.jsonl import read_json_lines

MAX_TEXT = 20_000
"""Characters of a message; the middle of a longer one is left out."""

MAX_ROLLOUTS = 20_000
"""Rollouts of one step that are shown."""

_FILES = ("train_rollouts.jsonl", "eval_rollouts.jsonl")
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
_NUMBERS = {"reward": "reward", "advantage": "advantage", "tokens": "num_tokens"}


class SavedRollouts:
    def __init__(self, run_dir: Path | None, seq_len: int | None = None) -> None:
        """`seq_len`: a rollout that is sent and longer was truncated."""
        self._folder = None if run_dir is None else run_dir / "rollouts"
        self._seq_len = seq_len
        self._counted: dict[int, tuple[object, Counter[str]]] = {}

    def steps(self) -> dict[int, list[Path]]:
        """Returns the files of every step that has some; links that lead out of the run are not followed."""
        if self._folder is None:
            return {}
        home = self._folder.parent.resolve()
        folders = sorted(step_folders(self._folder).items())
        files = {step: [folder / name for name in _FILES] for step, folder in folders}
        found = {step: [path for path in paths if _is_within(path, home)] for step, paths in files.items()}
        return {step: paths for step, paths in found.items() if paths}

    def state(self) -> tuple[object, ...]:
        """Changes whenever a rollout was saved. Only the last steps are written to."""
        steps = self.steps()
        last = [path for paths in list(steps.values())[-8:] for path in paths]
        return len(steps), *map(_stamp, last)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns the number of rollouts by step and outcome; reads only files that changed."""
        found = {}
        for step, paths in self.steps().items():
            stamp = tuple(map(_stamp, paths))
            if step not in self._counted or self._counted[step][0] != stamp:
                self._counted[step] = (
                    stamp,
                    Counter(state for row in self.rows(step) for state in _states(row)),
                )
            found[str(step)] = dict(self._counted[step][1])
        return found

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Returns the rollouts of a step; lines that are no rollout are left out."""
        rows: list[dict[str, Any]] = []
        for path in self.steps().get(step, []):
            with suppress(PellucidError, OSError):
                for _, record in read_json_lines(path, report=lambda _: None):
                    if isinstance(record, dict) and len(rows) < MAX_ROLLOUTS:
                        rows.append(self._row(step, record))
        return rows

    def _row(self, step: int, record: Mapping[str, Any]) -> dict[str, Any]:
        turns = [turn for turn in _list(record, "trajectory") if isinstance(turn, dict)]
        length = max(
            (_whole(turn, "num_prompt_tokens") + _whole(turn, "num_tokens") for turn in turns), default=0
        )
        is_cut = record.get("outcome") == "sent" and self._seq_len is not None and length > self._seq_len
        spans = [span for turn in turns for span in _list(turn, "policy_versions")]  # [version, tokens]
        versions = [span[0] for span in spans if isinstance(span, list) and span and type(span[0]) is int]
        return {
            "step": step,
            **{name: _text(record.get(key)) for name, key in _WORDS.items()},
            **{name: _number(record.get(key)) for name, key in _NUMBERS.items()},
            "truncated": max(0, length - self._seq_len) if is_cut and self._seq_len is not None else 0,
            "version": min(versions, default=None),
            "messages": [
                *_messages(_list(record, "messages")),
                *(["assistant", _text(turn.get("text"))] for turn in turns),
            ],
            "metrics": {
                str(name)[:MAX_TEXT]: value
                for name, value in (record.get("metrics") or {}).items()
                if _number(value) is not None
            }
            if isinstance(record.get("metrics"), dict)
            else {},
        }


def _is_within(path: Path, home: Path) -> bool:
    with suppress(OSError, RuntimeError):  # a link in a circle
        return path.is_file() and path.resolve().is_relative_to(home)
    return False


def _states(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["outcome"] or "unknown"
    if row["truncated"]:
        yield "truncated"


def _messages(messages: list[Any]) -> Iterator[list[str]]:
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            yield [_text(message.get("role")), "\n".join(_text(text) for text in texts)]


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _whole(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    return value if type(value) is int else 0


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _text(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else str(value)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - MAX_TEXT:,} characters are left out …\n{text[-half:]}"


def _stamp(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None
