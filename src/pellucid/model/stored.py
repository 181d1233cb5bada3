"""The weights of a model in its safetensors files: each process of the trainer reads its rows, and no others.

    process 0 of 4     rows    0 …   999 of a weight with 4,000     and so on for every weight
    process 1          rows 1000 … 1,999

Experts are stored one by one and fused in the model. Transformers knows how; here it is done row by row:

    experts.gate_up_proj[7] = cat(experts.7.gate_proj.weight, experts.7.up_proj.weight)

Only experts, and buffers, are read whole. Files whose tensors become weights of the model in another way
raise `NotByRows`: transformers has to read them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.data.tokenizer import first_line
from pellucid.errors import ModelError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_PIECE_BYTES = 1 << 26
"""Bytes of a weight that are read at a time."""

_MAPPED_BYTES = 1 << 28
"""Bytes to read before files are closed: pages that were read count as memory of the process until then."""


class NotByRows(Exception):
    """Files that have to be read whole, by transformers; the text says why."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors that a weight is stored as."""

    weight: str
    """Name of the weight in the model."""

    tensor: str = ""
    """Name of the one tensor that has the weight's shape; "" if each row has its own."""

    rows: Sequence[Sequence[str]] = ()
    """Names of the tensors of each row; they adjoin along `dim` of the row."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    shape: tuple[int, ...]
    dtype: str


class StoredWeights:
    """Where the weights of a model's modules are stored; sharding and adapters leave the modules in place."""

    def __init__(self, name: str, hf: Any) -> None:
        """Looks up every weight of a model without weights, by the headers of the files alone.

        `name` is a hub name or folder; files of the hub are fetched. Raises NotByRows.
        """
        self._name = name
        self._tensors = _tensors_of(_files_of(name, hf.config))
        sources, unknown = _sources_of(hf, self._tensors)
        self._sources: dict[tuple[nn.Module, str], WeightSource] = {}
        self.misfits: dict[str, list[Any]] = {"missing_keys": [], "mismatched_keys": []}
        """Weights that the files lack, and those of another shape, as transformers lists them."""

        names: defaultdict[Tensor, list[str]] = defaultdict(list)
        for each, tensor in hf.state_dict(keep_vars=True).items():
            names[tensor].append(each)
        for tensor, tied in names.items():
            stored = [each for each in tied if each in sources]
            if len(stored) > 1:
                raise NotByRows(f"{' and '.join(stored)} are both in its files, and one weight by its config")
            if not stored:
                self.misfits["missing_keys"] += tied
                continue
            source = sources[stored[0]]
            self._check(source, tensor)
            path, _, attribute = stored[0].rpartition(".")
            self._sources[hf.get_submodule(path), attribute] = source
        missing = self.misfits["missing_keys"]
        if missing and (unknown or getattr(hf, "_keys_to_ignore_on_load_missing", None)):
            raise NotByRows(f"{missing[0]} is not in its files under that name")

    def _check(self, source: WeightSource, tensor: Tensor) -> None:
        name, wanted = source.weight, tuple(tensor.shape)
        used = [source.tensor] if source.tensor else [each for row in source.rows for each in row]
        if tensor.is_floating_point() and (odd := {self._tensors[each].dtype for each in used} - _FLOATS):
            raise NotByRows(f"{name} is stored as {odd.pop()}")
        if source.tensor:
            if (found := self._tensors[source.tensor].shape) != wanted:
                self.misfits["mismatched_keys"].append((name, found, wanted))
            return
        shapes = {self._shape_of_row(row, source.dim) for row in source.rows}
        if shapes != {wanted[1:]} or len(source.rows) != wanted[0]:
            raise NotByRows(f"the tensors of {name} do not make up its shape {list(wanted)}")

    def _shape_of_row(self, row: Sequence[str], dim: int) -> tuple[int, ...]:
        shapes = [self._tensors[each].shape for each in row]
        first = shapes[0]
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(rest) > 1 or dim >= len(first):
            return ()
        return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])

    @torch.no_grad()
    def fill(self) -> None:
        """Reads this process's shards, and whole what is not sharded; talks to no other process.

        Raises ModelError if a file cannot be read, or if numbers are not finite.
        """
        files = _OpenFiles(self._tensors)
        for (module, attribute), source in self._sources.items():
            local, first = _own_rows(getattr(module, attribute))
            try:
                if source.tensor:
                    _copy_rows(local, files, source.tensor, first)
                else:
                    for row, names in zip(local, source.rows[first:], strict=False):
                        row.copy_(torch.cat([files.whole(name) for name in names], source.dim))
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"model.name = {self._name!r}: its weights cannot be read any more ({first_line(error)})"
                ) from error
            if not _is_finite(local):
                raise ModelError(
                    f"model.name = {self._name!r}: {source.weight} holds NaN or infinities; start from an "
                    "earlier checkpoint, or from other weights"
                )


def _own_rows(weight: Tensor) -> tuple[Tensor, int]:
    """Returns this process's part of a weight, and the number of its first row; FSDP shards by rows."""
    if not isinstance(weight, DTensor):
        return weight, 0
    mesh = weight.device_mesh
    num_rows = -(-len(weight) // mesh.size(mesh.ndim - 1))
    return weight.to_local(), num_rows * mesh.get_local_rank(mesh.ndim - 1)


def _copy_rows(local: Tensor, files: "_OpenFiles", name: str, first: int) -> None:
    if not local.dim():
        local.copy_(files.whole(name))
    elif local.numel():
        for part in local.split(max(1, _PIECE_BYTES // local[0].nbytes)):
            part.copy_(files.rows(name, first, first + len(part)))
            first += len(part)


def _is_finite(local: Tensor) -> bool:
    """Returns whether all numbers are finite; takes no memory for it."""
    if not local.is_floating_point() or not local.numel():
        return True
    low, high = local.aminmax()  # either is NaN if any number is
    return bool(torch.isfinite(low) & torch.isfinite(high))


class _OpenFiles:
    """Reads tensors as views of files that are mapped into memory."""

    def __init__(self, tensors: dict[str, _StoredTensor]) -> None:
        self._tensors = tensors
        self._files: dict[Path, Any] = {}
        self._num_bytes = 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found: Tensor = self._file(name).get_slice(name)[start:stop]
        self._num_bytes += found.nbytes
        return found

    def whole(self, name: str) -> Tensor:
        found: Tensor = self._file(name).get_tensor(name)
        self._num_bytes += found.nbytes
        return found

    def _file(self, name: str) -> Any:
        if self._num_bytes > _MAPPED_BYTES:
            self._files.clear()
            self._num_bytes = 0
        path = self._tensors[name].path
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


def _files_of(name: str, config: Any) -> list[Path]:
    """Returns the files that `from_pretrained` would read; fetches those of the hub."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    if getattr(config, "quantization_config", None) is not None:
        raise NotByRows("its config.json says that it is quantised")
    if getattr(config, "transformers_weights", None) is not None:
        raise NotByRows("its config.json names a file of its own")
    try:
        found = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            return [Path(found)]
        index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            return [Path(path) for path in sorted(get_checkpoint_shard_files(name, index)[0])]
    except (OSError, ValueError, KeyError) as error:
        raise NotByRows(first_line(error)) from error
    raise NotByRows("it has no safetensors files")


def _tensors_of(files: Sequence[Path]) -> dict[str, _StoredTensor]:
    tensors = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    tensors[name] = _StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise NotByRows(f"{path.name}: {first_line(error)}") from error
    return tensors


def _sources_of(hf: Any, tensors: dict[str, _StoredTensor]) -> tuple[dict[str, WeightSource], list[str]]:
    """Returns the source of each weight by name, as transformers maps names, and the tensors of none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    state = hf.state_dict()
    mapping = get_model_conversion_mapping(hf)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    sources: dict[str, WeightSource] = {}
    parts: defaultdict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    for stored in sorted(tensors, key=dot_natural_key):  # experts in order of their numbers
        name, pattern = rename_source_key(stored, renamings, converters, hf.base_model_prefix, state)
        if name not in state and stored in state:
            name, pattern = stored, None
        if name not in state:
            unknown.append(stored)
        elif pattern is not None:
            parts[name][pattern].append(stored)
        elif name in sources:
            raise NotByRows(f"{name} is in its files twice, as {sources[name].tensor} and {stored}")
        else:
            sources[name] = WeightSource(name, stored)
    for name, by_source in parts.items():
        converter = by_pattern[next(iter(by_source))]
        dim = _dim_of_rows(converter)
        columns = [by_source.get(pattern, []) for pattern in converter.source_patterns]
        if name in sources or dim is None or len({len(column) for column in columns}) > 1:
            raise NotByRows(f"{name} is made of several tensors, and not row by row")
        sources[name] = WeightSource(name, rows=list(zip(*columns, strict=True)), dim=dim)
    return sources, unknown


def _dim_of_rows(converter: Any) -> int | None:
    """Returns the dimension in which the tensors of a row adjoin; None if a converter does not stack rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(each) for each in converter.operations]
    dims = [getattr(each, "dim", None) for each in converter.operations]
    if len(converter.target_patterns) > 1 or dims[0] != 0:
        return None
    if kinds == [MergeModulelist] and len(converter.source_patterns) == 1:
        return 0
    if kinds == [MergeModulelist, Concatenate] and dims[1] is not None and dims[1] >= 1:
        return int(dims[1]) - 1
    return None
