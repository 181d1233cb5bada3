"""Model and optimizer to disk and back, bit by bit, with `torch.distributed.checkpoint` (DCP).

Reading a checkpoint never runs code from it. DCP pickles its metadata and every value that is not a tensor;
`_SafeReader` and `_SafePlanner` unpickle nothing but the classes that DCP itself writes.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pellucid.errors import DataError

State = dict[str, Any]


def stage_state(model: nn.Module, optimizer: Optimizer) -> State:
    """A copy in the memory of the machine, which training does not change any more."""
    staged: State = _copied(_state(model, optimizer, StateDictOptions(cpu_offload=True)))
    return staged


def write_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, group: ProcessGroup | None = None
) -> None:
    """Every process of a sharded model calls it, and returns when all have written."""
    write_staged(_state(model, optimizer), folder, group)


def write_staged(state: State, folder: Path, group: ProcessGroup | None = None) -> None:
    failures: list[BaseException] = []
    try:
        with _quiet():
            save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # not even an Exception
        failures = [failure for failure, _ in error.failures.values()]
    if failures:
        raise failures[0]  # out here, where what it came from stays its context


def read_state(
    model: nn.Module, optimizer: Optimizer, folder: Path, group: ProcessGroup | None = None
) -> None:
    """Loads into the given model and optimizer, in place, whatever number of processes wrote the state.

    Moments and step counts come from the checkpoint; learning rate, betas and weight decay stay those of
    `optimizer`, because the configuration that resumes a run decides them.
    """
    own = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
    state = _state(model, optimizer)
    _load(state, folder, group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for parameters, settings in zip(optimizer.param_groups, own, strict=True):
        parameters.update(settings)


def read_model(model: nn.Module, folder: Path) -> None:
    """The weights alone, into the given model, in place."""
    state = get_model_state_dict(model)
    _load({"model": state}, folder)
    set_model_state_dict(model, state)


def _load(state: State, folder: Path, group: ProcessGroup | None = None) -> None:
    try:
        with _quiet():
            load(
                state,
                storage_reader=_SafeReader(folder),
                planner=_SafePlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, pickle.UnpicklingError):
            raise _not_ours(folder, str(failure)) from failure
        raise DataError(
            f"{folder} does not fit the model: {failure}; resume with the model.name that the run began with"
        ) from failure


class _SafeReader(FileSystemReader):
    """Reads DCP's metadata without running code from it, and only files that lie in the folder itself.

    The metadata is read here and not when `load` asks for it: DCP would hide the reason of a refusal.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with (folder / ".metadata").open("rb") as file:
                self._metadata: Metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, TypeError, ValueError) as error:
            raise _not_ours(folder, f"its .metadata is damaged: {error}") from error
        if not isinstance(self._metadata, Metadata) or not isinstance(self._metadata.storage_data, dict):
            raise _not_ours(folder, "its .metadata describes something else")
        for name in sorted({info.relative_path for info in self._metadata.storage_data.values()}):
            path = folder / name
            if path.parent != folder or not path.is_file() or path.is_symlink():
                raise _not_ours(folder, f"it has no file {name!r}, which its .metadata names")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _not_ours(folder: Path, reason: str) -> DataError:
    return DataError(f"{folder} is not a checkpoint that pellucid wrote: {reason}")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


_METADATA_CLASSES = {
    "pathlib": ("PosixPath", "WindowsPath"),
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}


class _SafePlanner(DefaultLoadPlanner):
    """Loads values that are not tensors (an optimizer's settings) with torch's `weights_only` unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def _state(model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> State:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
