"""Policy versions are written beside training: whole, in order, as they were, and not silently lost."""

import shutil
import socket
import threading
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pellucid.checks.rehearsal import rehearsing
from pellucid.config import TrainerConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import DiskError, TransportError
from pellucid.guard import weights_key
from pellucid.trainer import build
from pellucid.trainer.batches import NoBatches, OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate, train
from pellucid.trainer.parallel import BF16, Ranks
from pellucid.trainer.saver import WeightsPublisher
from pellucid.transport import Batch, FilesystemReceiver, FilesystemSender, encode_batch, weights
from pellucid.transport.digests import PublishedDigests, write_digests
from pellucid.transport.weights import (
    ServedWeights,
    WeightsCopy,
    published_versions,
    weights_folder,
    write_version,
)
from pellucid.transport.weights_pull import OfferClient


class Biased(nn.Module):
    """A layer, tied to itself under a second name, and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32, bias=False)
        self.tied = self.layer
        self.register_buffer("correction", torch.rand(8))


def taken(model: nn.Module, dtype: torch.dtype | None = None) -> WeightsCopy:
    copy = WeightsCopy(model, dtype)
    copy.take()
    return copy


def test_a_copy_keeps_the_weights_of_its_moment(tmp_path) -> None:
    model = Biased()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = taken(model)
    with torch.no_grad():
        model.layer.weight.zero_()
        model.correction.zero_()
    write_version(copy, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["correction", "layer.weight"]
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name])


def test_bfloat16_is_that_of_the_parameters_and_half_their_bytes(tmp_path) -> None:
    model, sizes = Biased(), {}
    for name, dtype in (("wide", torch.float32), ("narrow", torch.bfloat16)):
        (tmp_path / name).mkdir()
        write_version(taken(model, dtype), tmp_path / name)
        sizes[name] = (tmp_path / name / "model.safetensors").stat().st_size
    found = load_file(tmp_path / "narrow" / "model.safetensors")
    assert torch.equal(found["layer.weight"], model.layer.weight.bfloat16())
    assert torch.equal(found["correction"], model.correction)
    assert sizes["wide"] - sizes["narrow"] == 64 * 32 * 2
    served = Biased()
    ServedWeights(served).load(tmp_path / "narrow")
    assert torch.equal(served.layer.weight, model.layer.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("wanted", "precision", "expected"),
    [
        ("auto", None, torch.float32),
        ("auto", BF16, torch.bfloat16),
        ("float32", BF16, torch.float32),
        ("bfloat16", None, torch.bfloat16),
    ],
)
def test_the_published_dtype_is_the_one_that_computes_unless_it_is_chosen(
    wanted, precision, expected
) -> None:
    config = TrainerConfig(publish_dtype=wanted)
    assert Ranks(precision=precision).publish_dtype(config) == expected


def test_versions_appear_whole_and_one_after_the_other(tmp_path) -> None:
    publisher, may_end, written = WeightsPublisher(tmp_path, keep=2), threading.Event(), []

    def write_slowly(folder) -> None:
        (folder / "half").touch()
        assert may_end.wait(60)
        written.append(1)

    publisher.publish(1, write_slowly)
    assert publisher.is_writing
    assert published_versions(tmp_path) == []
    publisher.settle(wait=False)
    threading.Timer(0.05, may_end.set).start()
    publisher.publish(2, lambda folder: written.append(2))  # waits for version 1
    assert written[0] == 1
    publisher.settle()
    assert (written, published_versions(tmp_path)) == ([1, 2], [1, 2])
    publisher.publish(3, lambda folder: None)
    publisher.close()
    assert published_versions(tmp_path) == [2, 3]


def run_of(model, folder, *, batches, resume=False, ranks=None, lora=None):
    """A run of three steps with a checkpoint after each, and so many batches in its folder."""
    sample = TrainingSample.from_turn([5, 6], [7, 8], [-4.0, -4.0], env_name="a", run_id="run", advantage=1.0)
    for step in range(batches):
        payload = encode_batch(Batch("run", step, TokenTable.from_samples([sample])))
        FilesystemSender(folder).send(step, payload)
    config = TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": 3,
            "seq_len": 16,
            "model": {"name": str(model), "lora": lora},
            "trainer": {"threads": 1, "ckpt": {"interval": 1, "keep_last": 3}},
        }
    )
    batches = OrchestratorBatches(FilesystemReceiver(folder))
    run = build_run(config, batches, None, [], ranks, publishes=True)
    if resume:
        run.restore()
    return run


def test_a_version_that_cannot_be_written_ends_the_wait_for_the_next_batch(tiny_model, tmp_path) -> None:
    """The orchestrator waits for the version, and the trainer for the orchestrator's batch."""
    run = run_of(tiny_model, tmp_path, batches=1)
    run.update(accumulate(run, run.next_batch(0)))
    (tmp_path / "weights").touch()  # where a folder has to be
    run.publish(0)
    with pytest.raises((OSError, DiskError), match="weights"):
        run.next_batch(1)
    run.close()


def test_training_goes_on_while_a_version_is_written(tiny_model, tmp_path, monkeypatch) -> None:
    """The second step updates the weights while version 1 waits for its disk; version 1 is as it was."""
    run, may_end = run_of(tiny_model, tmp_path, batches=2), threading.Event()
    original = WeightsCopy.write

    def write(copy, path, digests):
        assert may_end.wait(60)
        return original(copy, path, digests)

    monkeypatch.setattr(WeightsCopy, "write", write)
    after = []
    for step in range(2):
        observer = accumulate(run, run.next_batch(step))
        update = run.update(observer)
        after.append({name: each.detach().clone() for name, each in run.policy.hf.named_parameters()})
        if step:
            assert published_versions(tmp_path) == []
            may_end.set()
        run.publish(step)
        if step:
            run.finish(step, observer, update)
    run.finish_publishing()
    run.close()
    assert published_versions(tmp_path) == [1, 2]
    for version, expected in enumerate(after, 1):
        found = load_file(weights_folder(tmp_path, version) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("lora", "precision"), [(None, None), ({"rank": 4}, BF16)])
def test_the_next_update_waits_for_weights_that_the_device_still_copies(
    tiny_model, tmp_path, monkeypatch, lora, precision
) -> None:
    """A second stream copies them, and here as late as it may. The host waits for neither."""
    may_end, original, after = threading.Event(), WeightsCopy.write, []
    monkeypatch.setattr(WeightsCopy, "write", lambda *copy: may_end.wait(60) and original(*copy))
    with rehearsing() as rehearsal:
        ranks = Ranks(device=rehearsal.device, precision=precision)
        run = run_of(tiny_model, tmp_path, batches=2, ranks=ranks, lora=lora)
        for step in range(2):
            run.update(accumulate(run, run.next_batch(step)))
            after.append({name: each.cpu() for name, each in run.trained.module.state_dict().items()})
            if not step:
                with rehearsal.phase("publish"):
                    run.publish(step)
        assert rehearsal.count("sync", "publish") == 0, rehearsal.table("sync")
        assert rehearsal.bytes("d2h", "publish") > 1000
        may_end.set()
        run.finish_publishing()
        run.close()
    (path,) = weights_folder(tmp_path, 1).glob("*.safetensors")
    found = load_file(path)
    before, now = ({name.removeprefix("hf."): each for name, each in some.items()} for some in after)
    dtype = torch.bfloat16 if precision and not lora else torch.float32
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert all(torch.equal(tensor, before[name].to(dtype)) for name, tensor in found.items())
    assert any(not torch.equal(tensor, now[name].to(dtype)) for name, tensor in found.items())


def test_gathered_weights_take_a_quarter_of_the_devices_memory_while_they_wait(tmp_path) -> None:
    """Of four weights of 1 MiB as they are published, three wait in 3.5 MiB, and then the first is copied."""
    model = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(4))
    with rehearsing(total_memory=14 << 20) as rehearsal, pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "_BUCKET_BYTES", 1 << 20)
        model.to(rehearsal.device)
        copy = WeightsCopy(model, torch.bfloat16)
        before = rehearsal.num_bytes
        with rehearsal.phase("take"):
            copy.take()
        assert rehearsal.num_bytes == before + (3 << 20)
        assert rehearsal.peak_bytes["take"] == before + (4 << 20)
        copy.write(tmp_path / "weights")
        assert rehearsal.num_bytes == before
    found = load_file(tmp_path / "weights")
    assert all(torch.equal(found[f"{at}.weight"], model[at].weight.held.bfloat16()) for at in range(4))


def test_a_crash_in_the_middle_of_a_version_leaves_the_one_before_it(
    tiny_model, tmp_path, monkeypatch
) -> None:
    """The folder as it is while version 2 is half written goes on to the weights of a run without a crash."""
    whole = run_of(tiny_model, tmp_path / "whole", batches=3)
    train(whole)
    whole.close()
    run, may_end, is_half = (
        run_of(tiny_model, tmp_path / "run", batches=3),
        threading.Event(),
        threading.Event(),
    )
    original = WeightsCopy.write

    def write(copy, path, digests):
        file = original(copy, path, digests)
        if len(published_versions(tmp_path / "run")) == 1:
            is_half.set()
            assert may_end.wait(60)
        return file

    monkeypatch.setattr(WeightsCopy, "write", write)
    for step in range(2):
        observer = accumulate(run, run.next_batch(step))
        update = run.update(observer)
        run.publish(step)
        if not step:
            run.finish(step, observer, update)
    assert is_half.wait(60)
    shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    may_end.set()
    run.close()
    assert published_versions(tmp_path / "crashed") == [1]
    resumed = run_of(tiny_model, tmp_path / "crashed", batches=0, resume=True)
    assert resumed.start == 1
    train(resumed)
    resumed.close()
    assert published_versions(tmp_path / "crashed") == [1, 2, 3]
    for version in (1, 2, 3):
        found, expected = (
            (weights_folder(tmp_path / name, version) / "model.safetensors").read_bytes()
            for name in ("crashed", "whole")
        )
        assert found == expected


def offering(model, folder) -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": 1,
            "seq_len": 16,
            "resume": True,
            "model": {"name": str(model)},
            "trainer": {"threads": 1},
            "weights": {"transport": "http"},
        }
    )


def test_weights_are_offered_once_those_of_an_earlier_attempt_are_taken_back(tiny_model, tmp_path) -> None:
    (tmp_path / "weights" / "step_5").mkdir(parents=True)
    (tmp_path / "weights" / "step_5" / "STABLE").touch()
    write_digests(tmp_path / "weights" / "step_5", PublishedDigests({}))
    config = offering(tiny_model, tmp_path)
    with closing(build_run(config, NoBatches(), None, [], publishes=True)) as run:
        key = weights_key(config.weights.run_key(tmp_path))
        client = OfferClient(f"http://127.0.0.1:{run.offer.port}", key, silence_s=0.2)
        with pytest.raises(TransportError, match="offers no weights"):
            client.versions()
        run.begin(config)
        client = OfferClient(client.url, key)
        assert client.versions() == {}


def test_a_run_that_cannot_be_made_leaves_its_port(tiny_model, tmp_path, monkeypatch) -> None:
    ports = []

    def refuse(**parts):
        ports.append(parts["offer"].port)
        raise ValueError("no run")

    monkeypatch.setattr(build, "Run", refuse)
    with pytest.raises(ValueError, match="no run"):
        build_run(offering(tiny_model, tmp_path), NoBatches(), None, [], publishes=True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))
