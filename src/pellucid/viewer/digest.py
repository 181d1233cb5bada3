"""A run as one row of a list, read from the ends of its files and a few places between them.

    metrics/trainer.jsonl         steps, loss, tokens trained, when it began and when it wrote last
    metrics/orchestrator.jsonl    reward, at about `NUM_PLACES` places from the first step to the last
    configs/rl.toml or sft.toml   settings; configs/step_N/*.toml, too, where the run was resumed
    logs/OUTCOME, logs/*.log      how it ended

A file is read again only once its time of change or its size differs, so a list of hundreds of runs costs a
look at their folders. Links are not followed.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

from pellucid.data.files import MAX_LINE_BYTES, OUTCOME, read_whole, step_folders
from pellucid.data.plain import clip_middle
from pellucid.errors import PellucidError, printable
from pellucid.export.foreign import number_in
from pellucid.export.paths import FOLDER, MARKER, RUN_PARTS
from pellucid.ledger.settings import UNNOTED, flatten, settings_files
from pellucid.viewer.access import WRITES_WITHIN_S

T = TypeVar("T")

RunState = Literal["running", "finished", "failed", "interrupted"]
MetricLine = Mapping[str, Any]

NUM_PLACES = 32
"""Lines of a long file that are read: enough for a sparkline."""

SMALL_BYTES = 1 << 16
"""Files up to this size are read whole."""

MAX_SHOWN = 300
"""Characters of a setting's value, or of the reason of a failure."""

STAGES = ("trainer", "orchestrator")
"""Parts of a run that log a line per step; the trainer's says when a step was done."""

_PARTS = {*RUN_PARTS, FOLDER, "logs"}
_TOLD = ("configs", "logs")
_HEADER = re.compile(r"^\[{1,2}([\w-]+)", re.MULTILINE)
_LOG = re.compile(r"logs/[^.]+\.log")
_TRAINED = ("total/trained_tokens", "total/loss_tokens")
_ENDS: Mapping[str, RunState] = {"finished": "finished", "failed": "failed", "interrupted": "interrupted"}
_BLOCK_BYTES = 1 << 13
_FAILED = re.compile(r"(?:error: )(.+)|(?:[\w.]+Error\b.*)")
"""The last line of a log whose process failed; those of an environment's errors are followed by others."""


class Setting(NamedTuple):
    """A value of a setting, as text, and the first step that it shaped."""

    step: int
    text: str


class RunDigest(NamedTuple):
    """The numbers, state and settings that a list shows of one run."""

    kind: str
    """`rl` or `sft`."""

    state: RunState
    reason: str
    """Why it failed, where that is known."""

    num_steps: int
    max_steps: int | None
    curve: list[list[float]]
    """[step, value] of the reward, or of the loss of an sft run, at some of its steps."""

    loss: float | None
    num_tokens: int | None
    """Tokens trained."""

    duration_s: float | None
    """Seconds that it ran, without the time between a stop and a resume."""

    written_at: float
    exported: bool
    settings: dict[str, list[Setting]]
    """Every setting that shapes a step, by its whole key; several values where a resume changed it."""


Stamps = Mapping[str, tuple[int, int]]
"""Time of change, in ns, and size of a run's files and folders, by their paths in it."""


class DigestReader:
    """Reads digests, and keeps them until a file or folder of the run changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[Stamps, RunDigest]] = {}
        self._read: dict[tuple[Path, str], tuple[object, Any]] = {}

    def digest(self, run: Path, now: float) -> RunDigest:
        """Reads what is new; what cannot be read is left out."""
        seen = _look(run)
        known = self._kept.get(run)
        if known is None or known[0] != seen:
            known = self._kept[run] = (seen, self._digest(run, seen))
        digest = known[1]
        is_silent = digest.state == "running" and now - digest.written_at >= WRITES_WITHIN_S
        if not is_silent:
            return digest._replace(reason=digest.reason if digest.state == "failed" else "")
        return digest._replace(state="failed" if digest.reason else "interrupted")

    def _digest(self, run: Path, seen: Stamps) -> RunDigest:
        """As if it were being written, where nobody wrote down how it ended."""
        configs, logs = ({name: seen[name] for name in seen if name.startswith(part)} for part in _TOLD)
        settings = self._keep(run, "settings", configs, lambda: _settings(run) if configs else {})
        state, reason = self._keep(run, "outcome", logs, lambda: _ended(run, logs))
        kind = "sft" if "configs/sft.toml" in seen else "rl"
        resumed_at = sorted(step for step in step_folders(run / "configs") if step > 0)
        trainer = self._lines(run, "trainer", seen, resumed_at, NUM_PLACES if kind == "sft" else 2)
        orchestrator = self._lines(run, "orchestrator", seen, resumed_at, NUM_PLACES)
        steps = trainer or orchestrator
        last = trainer[-1] if trainer else {}
        num_steps, max_steps = steps[-1]["step"] + 1 if steps else 0, _whole(settings.get("max_steps"))
        if state is None:
            state = "finished" if max_steps is not None and num_steps >= max_steps else "running"
        return RunDigest(
            kind,
            state,
            reason,
            num_steps,
            max_steps,
            _curve(trainer, "loss") if kind == "sft" else _curve(orchestrator or trainer, "reward/all"),
            number_in(last.get("loss")),
            next((last[name] for name in _TRAINED if type(last.get(name)) is int), None),
            next((seconds for _, seconds in reversed(elapsed(steps, resumed_at))), None),
            max((time_ns for time_ns, _ in seen.values()), default=0) / 1e9,
            _has_tokens(run),
            settings,
        )

    def _lines(
        self, run: Path, stage: str, seen: Stamps, resumed_at: Sequence[int], num_places: int
    ) -> list[MetricLine]:
        name = f"metrics/{stage}.jsonl"
        # A resumed run is read whole: how long it paused is known from the lines around each resume.
        places = None if resumed_at else num_places
        if name not in seen:  # or it is a link, or behind one
            return []
        return self._keep(
            run, name, (seen.get(name), places), lambda: read_metric_lines(run / name, num_places=places)
        )

    def _keep(self, run: Path, what: str, stamp: object, read: Callable[[], T]) -> T:
        known = self._read.get((run, what))
        if known is None or known[0] != stamp:
            known = self._read[run, what] = (stamp, read())
        value: T = known[1]
        return value


def elapsed(lines: Iterable[MetricLine], resumed_at: Sequence[int]) -> list[list[float]]:
    """Returns [step, seconds that the run had run], from the start of its first step on.

    Between a stop and a resume a run does not run: the first step after it counts as long as it says it took.
    """
    found: list[list[float]] = []
    total, before = 0.0, None
    for line in lines:
        now, own = number_in(line.get("time")), number_in(line.get("time/step_s")) or 0.0
        if now is None:
            continue
        is_resume = before is None or any(before[0] < step <= line["step"] for step in resumed_at)
        total += own if is_resume or before is None else max(0.0, now - before[1])
        before = line["step"], now
        found.append([line["step"], total])
    return found


def shown(value: Any) -> str:
    """Returns a setting's value as people write it: text without quotes, numbers and lists as in TOML."""
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return clip_middle(printable(text), MAX_SHOWN)


def _look(run: Path) -> Stamps:
    """Looks at the files that tell about a run, and at its folders; at nothing behind a link."""
    seen: dict[str, tuple[int, int]] = {}
    with suppress(OSError):
        for part in _entries(f"{run}"):
            if part.is_dir(follow_symlinks=False) and part.name in _PARTS:
                seen[part.name] = part.stat(follow_symlinks=False).st_mtime_ns, 0
                for entry in _entries(part.path) if part.name in ("configs", "metrics", "logs") else ():
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                        seen[f"{part.name}/{entry.name}"] = status.st_mtime_ns, status.st_size
    return seen


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def read_metric_lines(path: Path, *, num_places: int | None = None) -> list[MetricLine]:
    """Returns the lines of a file of metrics, by step; of a large one only about `num_places` of them."""
    with suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return []
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if num_places is None or size <= SMALL_BYTES:
                lines = file.readall().splitlines(keepends=True)
            else:
                first = _line_from(file.fileno(), 0)
                stride = (size - len(first)) / max(1, num_places - 2)
                starts = [int(len(first) + place * stride) for place in range(num_places - 2)]
                between = [_line_from(file.fileno(), start - 1) for start in starts]
                lines = [first, *between, _last_line(file.fileno(), size)]
        by_step = {line["step"]: line for line in map(_parsed, lines) if line is not None}
        return [by_step[step] for step in sorted(by_step)]
    return []


def _line_from(file: int, start: int) -> bytes:
    """Returns the first whole line after the byte `start`; the line at 0 for 0."""
    data, size = b"", _BLOCK_BYTES
    while size <= MAX_LINE_BYTES:
        data = os.pread(file, size, start)
        begin = 0 if start == 0 else data.find(b"\n") + 1
        end = data.find(b"\n", begin)
        if end >= 0 and (begin or start == 0):
            return data[begin : end + 1]
        if len(data) < size:
            break
        size *= 4
    return b""


def _last_line(file: int, end: int) -> bytes:
    """Returns the last line that is complete."""
    size = _BLOCK_BYTES
    while size <= MAX_LINE_BYTES:
        start = max(0, end - size)
        data = os.pread(file, end - start, start)
        last = data.rfind(b"\n")
        begin = data.rfind(b"\n", 0, max(0, last))
        if begin >= 0 or start == 0:
            return data[begin + 1 : last + 1]
        size *= 4
    return b""


def _parsed(line: bytes) -> MetricLine | None:
    with suppress(orjson.JSONDecodeError):
        record = orjson.loads(line) if line.endswith(b"\n") else None
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def _curve(lines: Sequence[MetricLine], name: str) -> list[list[float]]:
    points = [[line["step"], value] for line in lines if (value := number_in(line.get(name))) is not None]
    stride = max(1, len(points) // (2 * NUM_PLACES))
    return points if stride == 1 else [*points[:-1:stride], points[-1]]


def _settings(run: Path) -> dict[str, list[Setting]]:
    """Returns the settings of the last start, and what resumes changed."""
    configs = run / "configs"
    files = [path for name in ("rl", "sft") if (path := configs / f"{name}.toml").is_file()][:1]
    found: dict[str, list[Setting]] = {}
    for path in files or sorted(configs.glob("*.toml")):
        for key, text in _read(path).items():
            found.setdefault(key, [Setting(0, text)])
    for part in ("sft", *STAGES):
        starts = settings_files(run, part)
        history: dict[str, list[Setting]] = {}
        for step, path in starts.items() if len(starts) > 1 else ():
            for key, text in _read(path).items():
                values = history.setdefault(key, [])
                if not values or values[-1].text != text:
                    values.append(Setting(step, text))
        found |= history
    return found


def _read(path: Path) -> Mapping[str, str]:
    """Returns the settings of a file, as text; none of one that is damaged, or a link."""
    with suppress(PellucidError, OSError, UnicodeDecodeError, ValueError, RecursionError):
        if path.is_symlink():
            return {}
        text = read_whole(path).decode()
        # The runs of a sweep have most sections in common, and parsing takes most of the time.
        with suppress(ValueError):
            return {key: value for part in _sections(text) for key, value in _flat(part).items()}
        return _flat(text)
    return {}


def _sections(text: str) -> Iterator[str]:
    """Splits TOML where the first word of a table's name changes; half a value cannot be parsed."""
    start, word = 0, ""
    for header in _HEADER.finditer(text):
        if header[1] != word:
            yield text[start : header.start()]
            start, word = header.start(), header[1]
    yield text[start:]


@lru_cache(maxsize=4096)
def _flat(text: str) -> Mapping[str, str]:
    values = flatten(tomllib.loads(text)).items()
    return {key: shown(value) for key, value in values if key not in UNNOTED}


def _ended(run: Path, logs: Iterable[str]) -> tuple[RunState | None, str]:
    """Returns how the run ended, and why it failed; (None, reason or "") where nobody wrote that down."""
    written = _tail(run / OUTCOME, SMALL_BYTES) if OUTCOME in logs else ""
    outcome, _, reason = written.partition("\n")
    if (state := _ENDS.get(outcome)) is not None:
        return state, clip_middle(printable(reason), MAX_SHOWN)
    for name in sorted(logs):
        lines = _tail(run / name, _BLOCK_BYTES).splitlines() if _LOG.fullmatch(name) else []
        last = next((line for line in reversed(lines) if line and not line[0].isspace()), "")
        if failure := _FAILED.fullmatch(last):
            return None, clip_middle(printable(failure[1] or failure[0]), MAX_SHOWN)
    return None, ""


def _tail(path: Path, num_bytes: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(-min(num_bytes, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read().decode(errors="replace")
    return ""


def _has_tokens(run: Path) -> bool:
    with suppress(OSError), os.scandir(run / FOLDER) as entries:
        return any(os.path.exists(f"{entry.path}/{MARKER}") for entry in entries)
    return False


def _whole(setting: Sequence[Setting] | None) -> int | None:
    text = setting[-1].text if setting else ""
    return int(text) if text.isdecimal() else None
