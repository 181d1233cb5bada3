"""A checkpoint that is written beside the training has the state of its step, and is whole or not there."""

import io
import os
import pickle
import shutil
from pathlib import Path
from threading import Event

import orjson
import pytest
import torch
from safetensors import safe_open

from pellucid.checkpoint import STATE, Progress
from pellucid.checkpoint.state import read_state, take_state, write_state
from pellucid.config.trainer import CkptConfig
from pellucid.data.tensors import generators_of
from pellucid.errors import DataError
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.saver import (
    CheckpointSaver,
    restore_random_state,
    take_random_state,
)
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


def test_a_checkpoint_is_on_the_disk_before_it_is_stable(tmp_path, monkeypatch) -> None:
    synced: list[tuple[str, bool]] = []

    def note(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        synced.append((path.name, any(tmp_path.rglob("STABLE"))))

    monkeypatch.setattr(os, "fsync", note)
    saver = CheckpointSaver(tmp_path, CkptConfig(), Ranks())
    saver.save(progress(1), *trained())
    saver.settle(wait=True)
    files = {path.name for path in (tmp_path / "checkpoints" / "step_1").rglob("*")} - {"STABLE"}
    partial = f".step_1.partial-{os.getpid()}"
    assert {name for name, has_marker in synced if not has_marker} == {*files, partial}
    assert [name for name, has_marker in synced if has_marker] == [partial, "checkpoints"]


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


def saved_state(folder: Path) -> Path:
    model, optimizer = trained()
    step(model, optimizer)
    write_state(take_state(model, optimizer, copy=False), folder / STATE)
    return folder / STATE


def change_index(state: Path, change) -> None:
    index = orjson.loads((state / "tensors.json").read_bytes())
    for tensor in index.values():
        change(tensor)
    (state / "tensors.json").write_bytes(orjson.dumps(index))


def test_a_checkpoint_has_no_pickle_in_it(tmp_path) -> None:
    state = saved_state(tmp_path)
    assert sorted(path.name for path in state.iterdir()) == ["__0_0.safetensors", "tensors.json"]
    index = orjson.loads((state / "tensors.json").read_bytes())
    with safe_open(state / "__0_0.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {piece["name"] for tensor in index.values() for piece in tensor["pieces"]} == names
    assert index["model.weight"]["dtype"] == "float32"
    assert {name.removeprefix("optimizer.state.weight.") for name in index if "optimizer" in name} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


@pytest.mark.parametrize("name", [".metadata", "tensors.json", "__0_0.safetensors"])
def test_a_hostile_checkpoint_runs_no_code(tmp_path, name) -> None:
    """Once the format was DCP's own: `.metadata` is not even looked at any more."""
    state = saved_state(tmp_path)
    for pickled in (pickle.dumps(Bomb(tmp_path / "ran")), zipped(Bomb(tmp_path / "ran"))):
        (state / name).write_bytes(pickled)
        if name == ".metadata":
            read_state(*trained(), state)
        else:
            with pytest.raises(DataError, match="is not a checkpoint that this version wrote"):
                read_state(*trained(), state)
    assert not (tmp_path / "ran").exists()


def zipped(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link", "pipe", ".."])
def test_a_checkpoint_reads_no_file_but_its_own(tmp_path, name) -> None:
    state = saved_state(tmp_path)
    shutil.copy(state / "__0_0.safetensors", tmp_path / "outside")
    (state / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(state / "pipe")
    change_index(state, lambda tensor: [piece.update(file=name) for piece in tensor["pieces"]])
    with pytest.raises(DataError, match="it has no file"):
        read_state(*trained(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.update(dtype="os"), "is of dtype 'os'"),
        (lambda tensor: tensor.update(dtype="load"), "is of dtype 'load'"),
        (lambda tensor: tensor.update(size=[2**62]), "do not make up a tensor"),
        (lambda tensor: tensor.update(size=[-1]), "is damaged"),
        (lambda tensor: [piece.update(name="gone") for piece in tensor["pieces"]], "is damaged"),
        (lambda tensor: [piece.update(sizes=[9]) for piece in tensor["pieces"]], "do not make up a tensor"),
        (lambda tensor: [piece.update(name="model.weight@0") for piece in tensor["pieces"]], "of shape"),
        (lambda tensor: tensor.update(pieces=[]), "do not make up a tensor"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, change, message) -> None:
    state = saved_state(tmp_path)
    change_index(state, change)
    with pytest.raises(DataError, match=message):
        read_state(*trained(), state)


def test_every_process_goes_on_with_its_own_random_numbers() -> None:
    """A GPU's generator is a `torch.Generator` as any other; here a second one of the CPU stands for it."""
    processes = [[torch.Generator().manual_seed(10 * rank + device) for device in (0, 1)] for rank in (0, 1)]
    states = [take_random_state(generators) for generators in processes]
    saved = Progress(1, {}, states[0][0], [], states)
    drawn = [[torch.rand(3, generator=each).tolist() for each in own] for own in processes]
    assert len({number for own in drawn for numbers in own for number in numbers}) == 12
    for rank in (0, 1):
        fresh = [torch.Generator(), torch.Generator()]
        restore_random_state(fresh, saved, rank)
        assert [torch.rand(3, generator=each).tolist() for each in fresh] == drawn[rank]


def test_a_process_that_was_not_there_takes_the_state_of_the_first() -> None:
    first, other = torch.Generator().manual_seed(3), torch.Generator()
    states = [take_random_state([first])]
    restore_random_state([other], Progress(1, {}, states[0][0], [], states), 5)
    assert other.get_state().equal(first.get_state())
    older = torch.Generator()  # a checkpoint that knows the main process alone
    restore_random_state([older, torch.Generator()], Progress(1, {}, states[0][0], []), 1)
    assert older.get_state().equal(first.get_state())


def test_a_cpu_has_the_generator_that_torch_draws_from() -> None:
    before = torch.get_rng_state()
    try:
        (generator,) = generators_of(torch.device("cpu"))
        torch.manual_seed(7)
        expected = torch.Generator().manual_seed(7).get_state()
        assert generator.get_state().equal(expected)
    finally:
        torch.set_rng_state(before)
