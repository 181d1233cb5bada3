"""A checkpoint that is written beside the training has the state of its step, and is whole or not there."""

import io
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from pellucid.checkpoint import Progress
from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_state, write_state
from pellucid.config.trainer import CkptConfig
from pellucid.errors import DataError
from pellucid.trainer.ranks import Ranks
from pellucid.trainer.saver import CheckpointSaver
from pellucid.transport import stable_steps


class Gated(Ranks):
    """Nothing is written before the gate opens."""

    gate = Event()

    def share(self, make):
        assert self.gate.wait(30)
        return make()


class Failing(Ranks):
    def share(self, make):
        raise OSError(28, "No space left on device")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def progress(number: int) -> Progress:
    return Progress(number, {}, b"", [])


def test_training_goes_on_meanwhile(tmp_path) -> None:
    ranks = Gated()
    saver = CheckpointSaver(tmp_path, CkptConfig(asynchronous=True, keep_last=1), ranks)
    model, optimizer = trained()
    step(model, optimizer)
    weight, moment = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    saver.save(progress(1), model, optimizer)
    assert saver.settle(wait=False) is None
    step(model, optimizer)
    assert stable_steps(tmp_path / "checkpoints") == []
    ranks.gate.set()
    assert saver.settle(wait=True) == 1
    assert saver.settle(wait=True) is None
    assert stable_steps(tmp_path / "checkpoints") == [1]
    assert not torch.equal(model.weight, weight)
    read_state(model, optimizer, tmp_path / "checkpoints" / "step_1" / STATE)
    assert torch.equal(model.weight, weight)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_went_wrong_is_raised_where_training_is(tmp_path, asynchronous) -> None:
    saver = CheckpointSaver(tmp_path, CkptConfig(asynchronous=asynchronous), Failing())
    saver.save(progress(1), *trained())
    with pytest.raises(OSError, match="No space left"):
        saver.settle(wait=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_moments_come_from_the_checkpoint_and_settings_from_the_configuration(tmp_path) -> None:
    """A resumed run with other betas and weight decay trains by them, from the moments that it had."""
    saver = CheckpointSaver(tmp_path, CkptConfig(), Ranks())
    model, optimizer = trained()
    step(model, optimizer)
    saver.save(progress(1), model, optimizer)
    weight = model.weight.detach().double()
    resumed = torch.nn.Linear(2, 1, bias=False)
    changed = torch.optim.AdamW(resumed.parameters(), lr=0.01, betas=(0.5, 0.7), weight_decay=0.3)
    read_state(resumed, changed, tmp_path / "checkpoints" / "step_1" / STATE)
    step(resumed, changed)
    # Both gradients are 1. The first step left m = 1 - 0.9 and v = 1 - 0.999.
    m, v = 0.5 * 0.1 + 0.5, 0.7 * 0.001 + 0.3
    update = (m / (1 - 0.5**2)) / ((v / (1 - 0.7**2)) ** 0.5 + 1e-8)
    expected = weight * (1 - 0.01 * 0.3) - 0.01 * update
    eps = torch.finfo(torch.float32).eps  # a handful of float32 operations on numbers below 1
    assert torch.allclose(resumed.weight.detach().double(), expected, rtol=0, atol=8 * eps)


class Bomb:
    """Unpickles by running code that makes a file: what a hostile checkpoint does."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def hostile_metadata(state: Path, bomb: Bomb) -> None:
    (state / ".metadata").write_bytes(pickle.dumps(bomb))


def hostile_value(state: Path, bomb: Bomb) -> None:
    """Replaces the bytes of the learning rate, which is no tensor, by the bomb's."""
    with (state / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index = next(index for index in metadata.storage_data if index.fqn.endswith(".lr"))
    (state / "value.distcp").write_bytes(zipped(bomb))
    metadata.storage_data[index] = replace(
        metadata.storage_data[index],
        relative_path="value.distcp",
        offset=0,
        length=(state / "value.distcp").stat().st_size,
    )
    with (state / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def zipped(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("plant", [hostile_metadata, hostile_value])
def test_a_hostile_checkpoint_runs_no_code(tmp_path, plant) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    write_state(model, optimizer, tmp_path / STATE)
    plant(tmp_path / STATE, Bomb(tmp_path / "ran"))
    with pytest.raises(DataError, match="is not a checkpoint that pellucid wrote"):
        read_state(*trained(), tmp_path / STATE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link"])
def test_a_checkpoint_reads_no_file_but_its_own(tmp_path, name) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    state = tmp_path / STATE
    write_state(model, optimizer, state)
    shutil.copy(state / "__0_0.distcp", tmp_path / "outside")
    (state / "link").symlink_to(tmp_path / "outside")
    with (state / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.storage_data = {
        index: replace(info, relative_path=name) for index, info in metadata.storage_data.items()
    }
    (state / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match="it has no file"):
        read_state(*trained(), state)
