"""Several runs: finding them, listing them, and what lays them over each other.

    digest      a run as a row of the list
    curves      its metrics, and where each step lies in time and in tokens trained
    examples    which examples its saved rollouts, or else its exported records, are attempts at, by step
    attempts    those rollouts or records, with their texts

A run keeps its number as long as the list lives: it is part of addresses. A setting is shown where it differs
between the runs. That a run does not have it counts only beside runs of the same kind: an sft run has no
sampling temperature.
"""

import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_not
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from pellucid.data import TokenTable
from pellucid.data.files import step_folders
from pellucid.data.plain import clip_middle
from pellucid.errors import ConfigError, DataError, printable
from pellucid.export.paths import FOLDER, MARKER
from pellucid.viewer.access import Exports, RunFolder, is_run
from pellucid.viewer.digest import STAGES, DigestReader, RunDigest, Setting, elapsed, read_metric_lines
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.rollouts import MAX_TEXT, SavedRollouts, stamp_of
from pellucid.viewer.vocabulary import Vocabulary, open_vocabulary

MAX_RUNS = 500
MAX_INDEXED_STEPS = 400
"""Steps of a run, evenly spread, whose saved rollouts are looked through for examples."""

LOOK_AGAIN_S = 2.0
NOT_SET = "not set"
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12
_WIDE_TERMINAL = 100


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Returns the run folders at or below a folder, in the order of their paths; follows no links."""
    found: list[Path] = []
    left = [(folder, depth)]
    while left and len(found) < MAX_RUNS:
        place, levels = left.pop(0)
        if is_run(place):
            found.append(place)
        elif levels and place.is_dir():
            with os.scandir(place) as entries:
                inside = sorted(
                    entry.path
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
            left += [(Path(below), levels - 1) for below in inside]
    return found


class ListedRun(NamedTuple):
    number: int
    name: str
    """Its path from the folder that all listed runs have in common."""

    path: Path
    digest: RunDigest


class RunList:
    def __init__(self, places: Sequence[Path]) -> None:
        """`places`: run folders, and folders of runs, which are looked through again for new ones."""
        self._places = [place.resolve() for place in places]
        for place, given in zip(self._places, places, strict=True):
            if not place.is_dir():
                raise DataError(f"{given} is no folder; of several paths, each is a run folder or holds runs")
            if not find_runs(place):
                names = ", ".join(sorted(entry.name for entry in place.iterdir())[:5]) or "nothing"
                raise DataError(
                    f"{given} is no run folder and holds none: it has no configs, metrics, ledger, rollouts "
                    f"or token_exports, only {names}; give folders that `pellucid rl` or `sft` wrote"
                )
        twice = next((given for given in places if self._places.count(given.resolve()) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice; a run is compared with others: name each once")
        self._paths: list[Path] = []
        self._reader = DigestReader()
        self._exported: dict[Path, ExportedAttempts] = {}
        self._differing: tuple[list[object], list[str]] = ([], [])
        self._looked_at = -LOOK_AGAIN_S
        self._steps_read: dict[tuple[Path, int], tuple[object, list[Any]]] = {}
        self._lock = Lock()
        self._look()
        parents = [place if place in self._paths else place / "run" for place in self._places]
        self.folder = Path(os.path.commonpath([path.parent for path in parents]))
        """The folder that all of them lie in; names are relative to it."""

    def _look(self) -> None:
        """Adds the runs that are new."""
        if time.monotonic() - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = time.monotonic()
        known = set(self._paths)
        for place in self._places:
            for path in find_runs(place) if place.is_dir() else ():
                if path not in known and len(self._paths) < MAX_RUNS:
                    known.add(path)
                    self._paths.append(path)

    def runs(self) -> list[ListedRun]:
        """Returns the runs that are still there, those that changed last first."""
        with self._lock:
            self._look()
            now = time.time()
            found = [
                ListedRun(
                    number,
                    printable(str(path.relative_to(self.folder))),
                    path,
                    self._reader.digest(path, now),
                )
                for number, path in enumerate(self._paths)
                if path.is_dir()
            ]
        return sorted(found, key=lambda run: (-run.digest.written_at, run.name))

    def path(self, number: int) -> Path:
        if not 0 <= number < len(self._paths):
            raise DataError(f"there is no run {number}; the list has {len(self._paths)}")
        return self._paths[number]

    def head(self, *, live: bool, notes: Iterable[str] = ()) -> dict[str, Any]:
        """Returns what a page needs to list the runs; `live`: it can open them, and ask again."""
        listed = self.runs()
        keys = self._keys(listed)
        head = {
            "version": 1,
            "name": printable(self.folder.name or str(self.folder)),
            "runs": [_row(run, keys) for run in listed],
            "keys": keys,
            "common": {
                kind: {key: _plain(values) for key, values in run.digest.settings.items() if key not in keys}
                for kind in ("rl", "sft")
                for run in [run for run in listed if run.digest.kind == kind][:1]
            },
            "writing": any(run.digest.state == "running" for run in listed),
            "live": live,
            "notes": list(notes),
            "steps": [],
            "held": [],
            "metrics": {},
            "rollouts": {},
            "start_record": 0,
        }
        return {**head, "state": _checksum(head)}

    def _keys(self, listed: Sequence[ListedRun]) -> list[str]:
        """Returns `differing(listed)`; settings that did not change are the same objects."""
        settings: list[object] = [run.digest.settings for run in listed]
        if len(settings) != len(self._differing[0]) or any(map(is_not, settings, self._differing[0])):
            self._differing = settings, differing(listed)
        return self._differing[1]

    def curves(self, number: int) -> dict[str, Any]:
        """Returns every metric of a run, and [step, …] pairs for axes of seconds and of tokens trained."""
        path = self.path(number)
        metrics = RunFolder(path).metrics()
        lines = next(
            (found for name in STAGES if (found := read_metric_lines(path / "metrics" / f"{name}.jsonl"))), []
        )
        resumed_at = [step for step in step_folders(path / "configs") if step > 0]
        trained = metrics.get("total/trained_tokens") or _summed(metrics.get("loss_tokens", []))
        return {"metrics": metrics, "time": elapsed(lines, resumed_at), "tokens": trained}

    def examples(self, number: int) -> list[list[Any]]:
        """Returns [environment, example, [[step, number of attempts, mean reward], …]] of a run."""
        path, saved = self.path(number), self._attempts(number)
        steps = saved.steps()
        wanted = evenly(list(steps), MAX_INDEXED_STEPS)
        found: dict[tuple[str, str], list[list[float | None]]] = {}
        for step in wanted:
            stamp = tuple(map(stamp_of, steps[step]))
            known = self._steps_read.get((path, step))
            if known is None or known[0] != stamp:
                known = self._steps_read[path, step] = (stamp, _counted(saved.attempts(step)))
            for env, example, count, mean in known[1]:
                found.setdefault((env, example), []).append([step, count, mean])
        return [[env, example, places] for (env, example), places in found.items()]

    def attempts(self, number: int, step: int) -> list[dict[str, Any]]:
        """Returns the rollouts of a step, with their texts."""
        return self._attempts(number).rows(step)

    def _attempts(self, number: int) -> "SavedRollouts | ExportedAttempts":
        path = self.path(number)
        saved = RunFolder(path).rollouts()
        if saved.steps() or Exports(path).lacks_tokens():
            return saved
        return self._exported.setdefault(path, ExportedAttempts(path))


class ExportedAttempts:
    """Records of a token export as attempts at examples, for a run that saved no rollouts."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._exports = Exports(run)

    def steps(self) -> dict[int, list[Path]]:
        """Returns what tells that a step is complete, by step."""
        folder = self._run / FOLDER
        return {step: [folder / f"step_{step}" / MARKER] for step in self._exports.steps()}

    def attempts(self, step: int) -> list[tuple[str, str, float | None]]:
        """Returns (environment, example, reward) of every record of a step that names its example."""
        found = self._exports.records(step).batch(("env_name", "example_id", "reward"))
        return [
            (str(env), str(example), _known(reward))
            for env, example, reward in self._identities(found)
            if example is not None
        ]

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Returns the records of a step as the turns of their roles."""
        if not self._exports.has(step):
            return []
        rows = []
        for batch in self._exports.batches(self._exports.records(step)):
            segments = self._roles.segments(batch)
            for row, (env, example, reward) in enumerate(self._identities(batch)):
                ids = batch["token_ids"][batch.token_offsets[row] : batch.token_offsets[row + 1]].tolist()
                messages = [
                    {"role": role, "text": self._words(ids[start:end])} for role, start, end in segments[row]
                ]
                identity = {"step": step, "env": str(env), "example": str(example), "reward": _known(reward)}
                rows.append({**identity, "outcome": "", "messages": messages})
        return rows

    @staticmethod
    def _identities(batch: TokenTable) -> Iterator[tuple[Any, Any, Any]]:
        nothing = [None] * batch.num_sequences
        names = ("env_name", "example_id", "reward")
        columns = (nothing if batch.get(name) is None else batch[name].tolist() for name in names)
        return zip(*columns, strict=True)

    @cached_property
    def _roles(self) -> RoleFinder:
        return RoleFinder(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return open_vocabulary(None, RunFolder(self._run).model_folder())[0]

    def _words(self, ids: list[int]) -> str:
        return clip_middle(self._vocabulary.words(ids), MAX_TEXT)


def _known(reward: float | None) -> float | None:
    return None if reward is None or math.isnan(reward) else reward


def differing(runs: Sequence[ListedRun]) -> list[str]:
    """Returns the keys of settings that differ between the runs, those that most runs have first.

    The keys of one variant of a loss follow from the choice of the variant, and stand behind it.
    """
    settings = [(run.digest.kind, run.digest.settings) for run in runs if run.digest.settings]
    counts = Counter(key for _, own in settings for key in own)
    keys = sorted(counts, key=lambda key: (-counts[key], key))
    return [key for key in keys if _differs([(kind, own.get(key)) for kind, own in settings])]


def _differs(values: Sequence[tuple[str, Sequence[Setting] | None]]) -> bool:
    known = {tuple(value) for _, value in values if value is not None}
    lacking = {kind for kind, value in values if value is None}
    return len(known) > 1 or any(kind in lacking for kind, value in values if value is not None)


def value_text(values: Sequence[Setting] | None) -> str:
    """`0.0003`, or `0.0003 → 0.0001 from step 40` where a resume changed it."""
    if not values:
        return NOT_SET
    first, *others = values
    return first.text + "".join(f" → {each.text} from step {each.step}" for each in others)


def evenly(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, the first and the last among them."""
    if count >= len(steps):
        return steps
    last = len(steps) - 1
    return [steps[round(index * last / (count - 1))] for index in range(count)]


def run_table(runs: Sequence[ListedRun], width: int) -> Table:
    """Returns the list for a terminal of so many columns; a narrow one shows what matters most."""
    titles = ["run", "state", "steps", "reward", "", "loss", "tokens", "ran for", "export"]
    shown = [title for title in titles if width >= _WIDE_TERMINAL or title not in ("", "loss", "export")]
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in shown:
        justify: Literal["left", "right"] = "left" if title in ("run", "state", "", "export") else "right"
        table.add_column(title, overflow="fold", no_wrap=title != "run", justify=justify)
    for run in runs:
        own = run.digest
        of = f" of {own.max_steps:,}" if own.max_steps and own.max_steps != own.num_steps else ""
        values = [value for _, value in own.curve]
        reward = f"{values[0]:.4g} → {values[-1]:.4g}" if values and own.kind == "rl" else "–"
        cells: list[Text | str] = [
            Text(run.name),
            Text(own.state, style=_STYLES[own.state]),
            f"{own.num_steps:,}{of}",
            reward,
            _spark(values),
            "–" if own.loss is None else f"{own.loss:.4g}",
            "–" if own.num_tokens is None else f"{own.num_tokens:,}",
            "–" if own.duration_s is None else _span(own.duration_s),
            "tokens" if own.exported else "no export",
        ]
        table.add_row(*(cell for title, cell in zip(titles, cells, strict=True) if title in shown))
    return table


_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}


def settings_table(runs: Sequence[ListedRun]) -> Table:
    """Returns the settings that differ, for a terminal."""
    table = Table(
        title="settings that differ", title_justify="left", box=None, header_style="dim", pad_edge=False
    )
    table.add_column("key", overflow="fold")
    for run in runs:
        table.add_column(Text(run.name), overflow="fold")
    for key in differing(runs):
        values = [run.digest.settings.get(key) for run in runs]
        table.add_row(Text(printable(key)), *(Text(value_text(value)) for value in values))
    return table


def _row(run: ListedRun, keys: Sequence[str]) -> dict[str, Any]:
    own = run.digest
    return {
        "number": run.number,
        "name": run.name,
        "kind": own.kind,
        "state": own.state,
        "reason": own.reason,
        "steps": own.num_steps,
        "max_steps": own.max_steps,
        "curve": own.curve,
        "loss": own.loss,
        "tokens": own.num_tokens,
        "duration_s": own.duration_s,
        "written_at": own.written_at,
        "exported": own.exported,
        "settings": {key: _plain(own.settings[key]) for key in keys if key in own.settings},
    }


def _plain(values: Sequence[Setting]) -> str | list[Setting]:
    """Returns the text of a setting, or all of its [step, text] where a resume changed it."""
    return values[0].text if len(values) == 1 else list(values)


def _counted(attempts: Iterable[tuple[str, str, float | None]]) -> list[tuple[str, str, int, float | None]]:
    rewards: dict[tuple[str, str], list[float | None]] = {}
    for env, example, reward in attempts:
        rewards.setdefault((env, example), []).append(reward)
    means = {key: [value for value in values if value is not None] for key, values in rewards.items()}
    return [
        (env, example, len(rewards[env, example]), sum(known) / len(known) if known else None)
        for (env, example), known in means.items()
    ]


def _summed(points: Sequence[Sequence[float]]) -> list[list[float]]:
    total, found = 0.0, []
    for step, value in points:
        total += value
        found.append([step, total])
    return found


def _checksum(value: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(repr(value).encode(errors='replace')):08x}"


def _spark(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    chosen = [values[round(i * (len(values) - 1) / (_SPARK_WIDTH - 1))] for i in range(_SPARK_WIDTH)]
    return "".join(_BARS[int((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in chosen)


def _span(seconds: float) -> str:
    """`1 h 20 min`, `3 min 5 s`, `12 s`; `duration` of the page writes the same."""
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"
