"""Model and optimizer to disk and back, bit by bit, with `torch.distributed.checkpoint`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
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
    try:
        with _quiet():
            load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise DataError(
            f"{folder} does not fit the model: {failure}; resume with the model.name that the run began with"
        ) from failure
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for parameters, settings in zip(optimizer.param_groups, own, strict=True):
        parameters.update(settings)


def read_model(model: nn.Module, folder: Path) -> None:
    """The weights alone, into the given model, in place."""
    state = get_model_state_dict(model)
    try:
        with _quiet():
            load({"model": state}, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise DataError(f"{folder} does not fit the model: {failure}") from failure
    set_model_state_dict(model, state)


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
