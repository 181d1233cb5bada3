"""Writes and reads model and optimizer, bit by bit, with `torch.distributed.checkpoint` (DCP).

    __0_0.safetensors   tensors, or pieces of them, that the first process holds; __1_0 of the second, …
    tensors.json        dtype and size of every tensor, and the file of each piece of it

DCP plans which process writes and reads which piece. Its metadata and tensors, which it would pickle, are
JSON and safetensors here, so that reading a checkpoint cannot run code from it.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from pellucid.data.files import read_whole, sync
from pellucid.errors import DataError
from pellucid.transport.weights import write_tensors

State = dict[str, Any]
T = TypeVar("T")


def take_state(model: nn.Module, optimizer: Optimizer, *, copy: bool) -> State:
    """Returns what a checkpoint saves; a copy in CPU memory lets training go on while it is written."""
    options = StateDictOptions(cpu_offload=True) if copy else None
    state = _tensors(*get_state_dict(model, optimizer, options=options))
    is_shared = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return cast(State, _copied(state, is_shared=is_shared)) if copy else state


def write_state(state: State, folder: Path, group: ProcessGroup | None = None) -> None:
    """Writes the state; every process of a sharded model calls it, and returns when all have written."""
    failures: list[BaseException] = []
    try:
        with _quiet():
            save(state, storage_writer=_TensorWriter(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # derives from BaseException
        failures = [failure for failure, _ in error.failures.values()]
    if failures:
        raise failures[0]  # outside of `except`, so that it keeps its own context


def read_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, group: ProcessGroup | None = None
) -> None:
    """Loads into the given model and optimizer, in place, whatever number of processes wrote the state.

    Moments and step counts come from the checkpoint; learning rate, betas and weight decay stay those of
    `optimizer`, because the configuration that resumes a run decides them.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    _load(_tensors(model_state, optimizer_state), folder, group)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def read_model(model: nn.Module, folder: Path) -> None:
    """Loads the weights alone into the given model, in place."""
    state = get_model_state_dict(model)
    _load({"model": state}, folder)
    set_model_state_dict(model, state)


def _load(state: State, folder: Path, group: ProcessGroup | None = None) -> None:
    reader = _TensorReader(folder)
    try:
        with _quiet():
            load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, DataError):
            raise failure from error
        raise DataError(
            f"{folder} does not fit the model: {failure}; resume with the model.name that the run began with"
        ) from failure


_INDEX = "tensors.json"
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Piece(msgspec.Struct, frozen=True):
    file: str
    name: str
    """Name of the piece in that file."""

    offsets: list[_Count]
    sizes: list[_Count]


class _SavedTensor(msgspec.Struct, frozen=True):
    dtype: str
    size: list[_Count]
    pieces: list[_Piece]


class _TensorWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path = Path(self.path) / f"{plan.storage_data.prefix}0.safetensors"
        pieces = {f"{item.index.fqn}@{number}": item for number, item in enumerate(plan.items)}
        tensors = {name: cast(Tensor, planner.resolve_data(item)) for name, item in pieces.items()}
        write_tensors(path, tensors, (tensor.detach().cpu().contiguous() for tensor in tensors.values()))
        sync(path)
        return _done(
            [
                WriteResult(item.index, tensors[name].nbytes, (path.name, name))
                for name, item in pieces.items()
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for each in results for result in each}
        saved = {}
        for fqn, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)  # see `_tensors`
            pieces = []
            for chunk in tensor.chunks:
                file, name = places[MetadataIndex(fqn, chunk.offsets)]
                pieces.append(_Piece(file, name, list(chunk.offsets), list(chunk.sizes)))
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            saved[fqn] = _SavedTensor(dtype, list(tensor.size), pieces)
        path = Path(self.path) / _INDEX
        path.write_bytes(msgspec.json.encode(saved))
        sync(path)


class _TensorReader(FileSystemReader):
    """Reads only files that lie in the folder itself.

    The constructor reads the index, not `read_metadata`: DCP would hide the reason of an error.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        try:
            self._saved = msgspec.json.decode(read_whole(folder / _INDEX), type=dict[str, _SavedTensor])
        except FileNotFoundError as error:
            raise _not_ours(folder, f"it has no {_INDEX}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_ours(folder, f"its {_INDEX} is damaged: {error}") from error
        for name in sorted({piece.file for each in self._saved.values() for piece in each.pieces}):
            path = folder / name
            if path.parent != folder or not path.is_file() or path.is_symlink():
                raise _not_ours(folder, f"it has no file {name!r}, which its {_INDEX} names")
        for fqn, each in self._saved.items():
            if sum(math.prod(piece.sizes) for piece in each.pieces) != math.prod(each.size):
                raise _not_ours(folder, f"the pieces of {fqn} do not make up a tensor of size {each.size}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for fqn, each in self._saved.items():
            dtype = getattr(torch, each.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise _not_ours(self._folder, f"{fqn} is of dtype {each.dtype!r}")
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in each.pieces
            ]
            tensors[fqn] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(each.size), chunks)
        return Metadata(
            tensors,
            storage_data={
                MetadataIndex(fqn, piece.offsets): piece
                for fqn, each in self._saved.items()
                for piece in each.pieces
            },
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ExitStack() as opened:
            files: dict[str, Any] = {}
            for item in plan.items:
                piece: _Piece = self.storage_data[item.storage_index]
                path = self._folder / piece.file
                try:
                    if piece.file not in files:
                        files[piece.file] = opened.enter_context(safe_open(path, framework="pt"))
                    tensor: Tensor = files[piece.file].get_tensor(piece.name)
                except (OSError, SafetensorError) as error:
                    raise _not_ours(self._folder, f"{piece.file} is damaged: {error}") from error
                if list(tensor.shape) != piece.sizes:
                    raise _not_ours(self._folder, f"{piece.name} is of shape {list(tensor.shape)}")
                for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    tensor = tensor.narrow(axis, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor)
                planner.commit_tensor(item, target)
        return _done(None)


def _done(value: T) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(value)
    return done


def _not_ours(folder: Path, reason: str) -> DataError:
    return DataError(f"{folder} is not a checkpoint that this version wrote: {reason}")


def _copied(value: Any, *, is_shared: bool) -> Any:
    """Copies what shares memory with the state: all of it on a CPU, and single numbers wherever they are."""
    if isinstance(value, dict):
        return {key: _copied(each, is_shared=is_shared) for key, each in value.items()}
    return value.detach().clone() if is_shared or value.dim() == 0 else value.detach()


def _tensors(model_state: State, optimizer_state: Any) -> State:
    """Picks the part that is saved: the rest of an optimizer's state are its settings."""
    return {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
