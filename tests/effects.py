"""What a run left behind, as numbers that can be compared with those of another run.

    weights, checkpoint   every tensor; counters, but for those that packing decides
    tokens                every column of every exported sequence, but for its place in a micro batch
    rollouts              every field of every saved rollout, but for what a clock tells
    ledger                counts by process, step and environment, but for those that packing decides

Two runs differ by rounding alone if everything that is counted or named is equal, and no number is further
away than float32 explains.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

Facts = dict[str, NDArray[np.float64] | str]
"""Floating-point numbers as arrays, everything else as text."""

PLACES = ("micro_step", "micro_sequence_idx", "export_sequence_idx")
PACKING = ("computed", "saved", "padding", "micro_batches")
"""Parts of the names of counts that depend on how sequences were packed."""

PACKED_TOTALS = ("total/tokens", "total/local/tokens")
"""Running totals that include padding."""

TENSOR_TOLERANCE = 1e-4
"""Of a tensor's norm. AdamW turns the rounding of a tiny gradient into a whole step."""

COLUMN_TOLERANCE, SMALLEST_SCALE = 1e-5, 1e-2
"""Of a column's largest value, or of the smallest scale: a mismatch KL of 1e-14 is rounding itself."""


def facts_of(run: Path) -> Facts:
    facts: Facts = {}
    for path in _files(
        run, "weights/**/*.safetensors", "model/*.safetensors", "checkpoints/**/*.safetensors"
    ):
        for name, tensor in load_file(path).items():
            facts[f"tensor {path.relative_to(run)} {name}"] = tensor.double().numpy()
    for path in _files(run, "checkpoints/*/progress.json"):
        progress = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "files"}
        facts[f"checkpoint {path.relative_to(run)}"] = _text(_without_packing(progress))
    for path in _files(run, "checkpoints/orchestrator*.bin"):
        facts[f"checkpoint {path.name}"] = path.read_bytes().hex()
    for kind, pattern in (("tokens", "token_exports/*/*.jsonl"), ("rollouts", "rollouts/*/*.jsonl")):
        for path in _files(run, pattern):
            for index, record in enumerate(sorted(map(unclocked, _records(path)), key=_identity)):
                facts |= _columns(f"{kind} {path.parent.name} {index}", record)
    facts["ledger"] = _text(_ledger(run))
    return facts


def difference(expected: Facts, found: Facts) -> tuple[str, str]:
    """("same" | "rounding" | "differs", the first fact that says so)."""
    if missing := expected.keys() ^ found.keys():
        return "differs", min(missing)
    rounded = ""
    scales = _scales(expected)
    for name, value in expected.items():
        other = found[name]
        if isinstance(value, str) or isinstance(other, str):
            if not (isinstance(value, str) and isinstance(other, str) and value == other):
                return "differs", name
        elif not _is_near(value, other, scales[_column(name)] if not name.startswith("tensor") else None):
            return "differs", name
        elif not np.array_equal(value, other, equal_nan=True):
            rounded = rounded or name
    return ("rounding", rounded) if rounded else ("same", "")


def _is_near(value: NDArray[np.float64], other: NDArray[np.float64], scale: float | None) -> bool:
    if value.shape != other.shape or not np.array_equal(np.isnan(value), np.isnan(other)):
        return False
    gap = np.nan_to_num(value - other, nan=0.0, posinf=np.inf, neginf=-np.inf)
    if scale is None:
        return bool(np.linalg.norm(gap) <= TENSOR_TOLERANCE * np.linalg.norm(value))
    return bool(np.abs(gap).max(initial=0.0) <= COLUMN_TOLERANCE * max(scale, SMALLEST_SCALE))


def _scales(facts: Facts) -> Mapping[str, float]:
    """The largest value of each column, over all records."""
    scales: dict[str, float] = {}
    for name, value in facts.items():
        if not isinstance(value, str) and not name.startswith("tensor"):
            largest = float(np.nan_to_num(np.abs(value), nan=0.0).max(initial=0.0))
            scales[_column(name)] = max(scales.get(_column(name), 0.0), largest)
    return scales


def _column(name: str) -> str:
    return name.rpartition(" ")[2]


def _columns(name: str, record: Mapping[str, Any]) -> Facts:
    facts: Facts = {}
    for key, value in record.items():
        if key in PLACES:
            continue
        if isinstance(value, Mapping) and value:
            facts |= _columns(name, {f"{key}.{inner}": each for inner, each in value.items()})
            continue
        numbers = value if isinstance(value, list) else [value]
        is_float = any(isinstance(each, float) for each in numbers)
        is_plain = all(each is None or type(each) in (int, float) for each in numbers)
        if is_float and is_plain:
            facts[f"{name} {key}"] = np.array(numbers, np.float64)
        else:
            facts[f"{name} {key}"] = _text(value)
    return facts


CLOCKED = ("time_s", "start_s", "wait_s")
"""Fields of a saved rollout and of its turns that depend on the machine."""


def unclocked(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved rollout, or any other record, without what a clock told it."""
    kept = {key: value for key, value in record.items() if key not in CLOCKED}
    if "trajectory" in kept:
        kept["trajectory"] = [unclocked(turn) for turn in kept["trajectory"]]
    return kept


def _identity(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_text(record.get(key)) for key in ("run_id", "rollout_id", "sample_id", "token_ids"))


def _ledger(run: Path) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for path in _files(run, "ledger/*.jsonl"):
        for entry in _records(path):
            step = "" if path.stem == "inference" else entry.get("step", 0)  # a server knows no steps
            for name, count in entry.get("counts", {}).items():
                if name not in PACKING:
                    counts[f"{path.stem}/{step}/{entry.get('env')}/{name}"] += count
    return sorted(counts.items())


def _without_packing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_packing(each)
            for key, each in value.items()
            if key not in PACKED_TOTALS and not any(part in key for part in PACKING)
        }
    if not isinstance(value, list):
        return value
    kept = [_without_packing(each) for each in value]
    # An entry that counts padding alone.
    return [each for each in kept if not (isinstance(each, Mapping) and each.get("counts") == {})]


def _files(run: Path, *patterns: str) -> Sequence[Path]:
    return [path for pattern in patterns for path in sorted(run.glob(pattern))]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
