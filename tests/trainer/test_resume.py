"""Resumed = uninterrupted, bit by bit, for the trainer given the same batches."""

import asyncio
import errno
import os
import random
import re
import resource
import signal
import threading
import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pellucid.checkpoint import newest_intact
from pellucid.cli import main
from pellucid.config import OrchestratorRunConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.ending import SILENCE_S
from pellucid.errors import ConfigError, DataError, TransportError
from pellucid.launch.run_folder import rewind_rl
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.ledger.settings import record_settings
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model
from pellucid.orchestrator import _check_resume, _missing_batch
from pellucid.orchestrator.snapshot import (
    Snapshot,
    has_trainers_part,
    read_snapshot,
    settle_orchestrator,
    write_snapshot,
)
from pellucid.trainer import run_with
from pellucid.trainer.batches import OrchestratorBatches, Stopped, StopRequest
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import say_finishing
from pellucid.transport import (
    Batch,
    FilesystemReceiver,
    FilesystemSender,
    encode_batch,
    open_sender,
    stable_steps,
)
from pellucid.transport.weights import weights_folder

pytestmark = pytest.mark.slow

NUM_STEPS = 7


class Crash(Exception):
    """As good as a kill -9: no more is written."""


class CrashAt:
    def __init__(self, step: int) -> None:
        self._step = step

    def log(self, step, values) -> None:
        if step == self._step:
            raise Crash

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def samples():
    generator = random.Random(0)
    return [
        TrainingSample.from_turn(
            [generator.randrange(5, 101) for _ in range(generator.randint(1, 9))],
            completion := [generator.randrange(5, 101) for _ in range(generator.randint(1, 9))],
            [generator.uniform(-5, -3) for _ in completion],
            env_name="ab"[index % 2],
            run_id="run",
            rollout_id=f"r{index}",
            group_id=f"g{index // 2}",
            reward=float(index),
            advantage=generator.uniform(-1, 1),
        )
        for index in range(2 * NUM_STEPS)
    ]


def settings(model, folder, *, asynchronous=False, **changes):
    """A checkpoint every 3 steps, a schedule that depends on the step, one export file for all steps."""
    trainer = {
        "threads": 1,
        "ckpt": {"interval": 3, "keep_last": 2, "asynchronous": asynchronous},
        "optim": {"lr": 1e-3},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
        "experimental": {"token_export": {}},
    }
    values = {
        "output_dir": folder,
        "max_steps": NUM_STEPS,
        "seq_len": 256,
        "model": {"name": str(model)},
        "trainer": trainer,
    }
    return TrainerRunConfig.model_validate({**values, **changes})


def send(folder, samples) -> None:
    for step in range(NUM_STEPS):
        table = TokenTable.from_samples(samples[2 * step : 2 * step + 2])
        FilesystemSender(folder).send(step, encode_batch(Batch("run", step, table)))
    write_snapshot(folder, Snapshot(batches_sent=NUM_STEPS))


def run(settings, *sinks, resume=False):
    settings = settings.model_copy(update={"resume": resume})
    folder = settings.output_dir
    journal = Journal(folder / "ledger" / "trainer.jsonl", Stage.TRAINER, resume=resume)
    built = build_run(
        settings, OrchestratorBatches(FilesystemReceiver(folder)), journal, list(sinks), publishes=True
    )
    try:
        if resume:
            built.restore()
        train(built)
    finally:
        built.close()
    return built


def metrics(folder):
    return [
        {key: value for key, value in record.items() if not key.startswith(("time", "throughput", "memory"))}
        for record in read_metrics(folder / "metrics" / "trainer.jsonl")
    ]


def exports(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted((folder / "token_exports").rglob("*.jsonl"))
    }


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    send(folder, samples)
    return folder, run(settings(tiny_model, folder))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at-once", "beside"])
@pytest.mark.parametrize("crash_at", [0, 2, 4, 6], ids=lambda step: f"after-step-{step}")
def test_a_resumed_trainer_equals_an_uninterrupted_one(
    tiny_model, samples, uninterrupted, tmp_path, crash_at, asynchronous
) -> None:
    send(tmp_path, samples)
    own = settings(tiny_model, tmp_path, asynchronous=asynchronous)
    with pytest.raises(Crash):
        run(own, CrashAt(crash_at))
    torch.rand(100)  # the random state of another process is another
    point = rewind_rl(own)
    assert (point.checkpoint, point.next_batch) == (crash_at // 3 * 3, NUM_STEPS)
    resumed = run(own, resume=True)

    folder, whole = uninterrupted
    for name, parameter in whole.policy.named_parameters():
        assert torch.equal(parameter, resumed.policy.get_parameter(name)), name
    for index, moments in whole.optimizer.adamw.state_dict()["state"].items():
        for name, moment in moments.items():
            assert torch.equal(moment, resumed.optimizer.adamw.state_dict()["state"][index][name])
    assert metrics(tmp_path) == metrics(folder)
    assert [record["step"] for record in metrics(tmp_path)] == list(range(NUM_STEPS))
    assert exports(tmp_path) == exports(folder)
    books = [list(read_journal(where / "ledger" / "trainer.jsonl")) for where in (tmp_path, folder)]
    assert books[0] == books[1]
    assert stable_steps(tmp_path / "weights") == stable_steps(folder / "weights")
    for version in stable_steps(folder / "weights"):
        name = f"weights/step_{version}/model.safetensors"
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


class FillAt:
    """From a step on, once its weights are out, no file may grow beyond so many bytes: the disk is full."""

    def __init__(self, folder: Path, step: int, num_bytes: int) -> None:
        self._folder = folder
        self._step = step
        self._num_bytes = num_bytes

    def log(self, step, values) -> None:
        if step == self._step:
            while step + 1 not in stable_steps(self._folder / "weights"):
                time.sleep(0.01)
            limit_files(self._num_bytes)

    def close(self) -> None:
        pass


def limit_files(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


@pytest.mark.parametrize(
    ("step", "num_bytes", "refused"),
    [
        (3, 0, "ledger/trainer.jsonl"),
        (3, 60_000, "weights/step_5"),
        (4, 150_000, "checkpoints/step_6"),
    ],
)
def test_a_disk_that_fills_up_ends_a_run_that_goes_on_later(
    tiny_model, samples, uninterrupted, tmp_path, step, num_bytes, refused
) -> None:
    send(tmp_path, samples)
    with pytest.raises(OSError) as full:
        try:
            run(settings(tiny_model, tmp_path), FillAt(tmp_path, step, num_bytes))
        finally:
            limit_files(resource.RLIM_INFINITY)
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(tmp_path / refused))
    assert list(tmp_path.rglob(".*.partial-*")) == []
    rewind_rl(settings(tiny_model, tmp_path))
    run(settings(tiny_model, tmp_path), resume=True)
    assert metrics(tmp_path) == metrics(uninterrupted[0])
    assert exports(tmp_path) == exports(uninterrupted[0])


def test_a_damaged_weight_file_is_made_anew(tiny_model, samples, tmp_path, caplog) -> None:
    """Else the engine of a resumed run could not serve the checkpoint's version, again and again."""
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(4))
    path = tmp_path / "weights" / "step_3" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    own = settings(tiny_model, tmp_path)
    rewind_rl(own)
    assert f"{path} is damaged or cut short" in caplog.text
    assert 3 not in stable_steps(tmp_path / "weights")
    with pytest.raises(Crash):  # before version 3 is old enough to be deleted
        run(own, CrashAt(4), resume=True)
    assert path.read_bytes() == whole


def test_batches_stay_until_every_kept_checkpoint_covers_them(tiny_model, samples, tmp_path) -> None:
    send(tmp_path, samples)
    left = {}

    class Watch:
        def log(self, step, values) -> None:
            left[step] = stable_steps(tmp_path / "batches")

        def close(self) -> None:
            pass

    run(settings(tiny_model, tmp_path), Watch())
    assert left[2] == left[3] == left[5] == list(range(7)) and left[6] == [3, 4, 5, 6]
    assert stable_steps(tmp_path / "checkpoints") == [6, 7]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tiny_model, samples, uninterrupted, tmp_path, caplog
) -> None:
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(6))
    damaged = next((tmp_path / "checkpoints" / "step_6" / "state").glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert rewind_rl(settings(tiny_model, tmp_path)).checkpoint == 3
    assert f"{damaged} is damaged" in caplog.text
    resumed = run(settings(tiny_model, tmp_path), resume=True)
    for name, parameter in uninterrupted[1].policy.named_parameters():
        assert torch.equal(parameter, resumed.policy.get_parameter(name)), name
    assert metrics(tmp_path) == metrics(uninterrupted[0])


def test_the_checkpoint_of_another_model_is_refused(tiny_model, samples, tmp_path) -> None:
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(4))
    make_tiny_model(tmp_path / "other", hidden_size=64, num_layers=2, num_heads=4)
    with pytest.raises(DataError) as refused:
        run(settings(tmp_path / "other", tmp_path), resume=True)
    assert re.fullmatch(
        r".*/step_3/state does not fit the model: Size mismatch .*; resume with the model.name that .*",
        str(refused.value),
    )


def test_a_refused_change_of_settings_leaves_the_run_as_it_is(tiny_model, samples, tmp_path) -> None:
    """Steps 3 and 4 are beyond the checkpoint, and stay there for a start with the right settings."""
    send(tmp_path, samples)
    config = settings(tiny_model, tmp_path, run_id="run")
    record_settings(config, "trainer", 0)
    with pytest.raises(Crash):
        run(config, CrashAt(4))
    exported = exports(tmp_path)
    with pytest.raises(ConfigError, match="resume with run_id = 'run'"):
        run_with(config.model_copy(update={"resume": True, "run_id": "other"}), Ranks())
    assert stable_steps(tmp_path / "weights")[-1] == 5
    assert len(exported) == 5 and exports(tmp_path) == exported


def test_the_checkpoint_knows_the_ledger(tiny_model, samples, tmp_path, caplog) -> None:
    """A journal that does not tell what the checkpoint knows is replaced."""
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(4))
    path = tmp_path / "ledger" / "trainer.jsonl"
    counts = sum(entry.counts["received"] for entry in read_journal(path) if entry.step < 3)
    path.unlink()
    rewind_rl(settings(tiny_model, tmp_path))
    assert sum(entry.counts["received"] for entry in read_journal(path)) == counts > 0
    assert "the checkpoint is believed" in caplog.text


def test_a_folder_can_be_rewound_on_its_own(tiny_model, samples, tmp_path, capsys) -> None:
    arguments = [
        "--output-dir",
        str(tmp_path / "run"),
        "--model.name",
        "m",
        "--orchestrator.env",
        '[{"id": "x"}]',
    ]
    assert main(["rewind", *arguments]) == 2
    assert "holds no run that could be resumed" in capsys.readouterr().err
    send(tmp_path / "run", samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path / "run"), CrashAt(4))
    assert main(["rewind", *arguments]) == 0
    assert capsys.readouterr().out == "resuming at step 3; 4 batches are trained from disk first\n"
    assert [record["step"] for record in metrics(tmp_path / "run")] == [0, 1, 2]


def test_the_orchestrators_part_of_a_run_is_not_rewound_without_the_trainers(tmp_path, capsys) -> None:
    """Its batches are on another machine, and would look lost."""
    write_snapshot(tmp_path / "run", Snapshot(batches_sent=7))
    arguments = ["--output-dir", str(tmp_path / "run"), "--model.name", "m"]
    assert main(["rewind", *arguments, "--orchestrator.env", '[{"id": "x"}]']) == 2
    assert "nothing of its trainer" in capsys.readouterr().err
    assert read_snapshot(tmp_path / "run").batches_sent == 7


def orchestrator_by_zmq(folder, **changes) -> OrchestratorRunConfig:
    values = {"output_dir": folder, "model": {"name": "m"}, "orchestrator": {"env": [{"id": "x"}]}}
    transport = {"type": "zmq", "port": 1}  # nobody listens there
    return OrchestratorRunConfig.model_validate(values | {"transport": transport, "resume": True} | changes)


@pytest.mark.parametrize("part", ["batches", "ledger/trainer.jsonl", "ledger/trainer_1.jsonl"])
def test_an_orchestrator_does_not_ask_a_trainer_that_works_in_its_folder(tmp_path, part) -> None:
    config = orchestrator_by_zmq(tmp_path)
    write_snapshot(tmp_path, Snapshot(batches_sent=7))
    assert not has_trainers_part(tmp_path)
    (tmp_path / part).mkdir(parents=True)
    assert has_trainers_part(tmp_path)
    with closing(open_sender(config.transport, tmp_path, "run")) as sender:
        assert asyncio.run(_missing_batch(config, sender)) is None


def test_an_orchestrator_refuses_what_cannot_be_resumed_before_it_asks_its_trainer(tmp_path) -> None:
    write_snapshot(tmp_path, Snapshot(batches_sent=7))
    with pytest.raises(ConfigError, match=r"max_steps = 6, but the run in .* has sampled 7 steps already"):
        _check_resume(orchestrator_by_zmq(tmp_path, max_steps=6))
    _check_resume(orchestrator_by_zmq(tmp_path, max_steps=7))


def test_a_trainer_says_at_its_begin_which_step_it_goes_on_with(tiny_model, samples, tmp_path) -> None:
    """A resumed trainer that has trained all steps never waits for a batch; an orchestrator may ask it."""
    send(tmp_path, samples)
    own = settings(tiny_model, tmp_path)
    run(own)

    class Expecting(FilesystemReceiver):
        expected = None

        def expect(self, step: int) -> None:
            self.expected = step

    receiver = Expecting(tmp_path)
    resumed = own.model_copy(update={"resume": True})
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER, resume=True)
    with closing(build_run(resumed, OrchestratorBatches(receiver), journal, [], publishes=True)) as built:
        built.begin(resumed)
        assert receiver.expected == built.start > 0


@pytest.mark.parametrize(("missing", "next_batch"), [(5, 5), (7, 7), (9, 7)])
def test_an_orchestrator_elsewhere_goes_on_with_the_batch_that_its_trainer_misses(
    tmp_path, missing, next_batch
) -> None:
    """At the latest with the one after its last: a batch that it never sent is none of its own."""
    write_snapshot(tmp_path, Snapshot(batches_sent=7))
    config = OrchestratorRunConfig.model_validate(
        {"output_dir": tmp_path, "model": {"name": "m"}, "orchestrator": {"env": [{"id": "x"}]}}
    )
    assert settle_orchestrator(config, missing=missing).batches_sent == next_batch


def test_one_export_file_for_all_steps_is_cut_back(tiny_model, samples, tmp_path) -> None:
    trainer = {
        "threads": 1,
        "ckpt": {"interval": 3},
        "experimental": {"token_export": {"path": str(tmp_path / "tokens.jsonl")}},
    }
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path, trainer=trainer), CrashAt(4))
    path = tmp_path / "tokens.rank_0.jsonl"
    before = path.read_bytes().splitlines()
    with path.open("ab") as file:
        file.write(b'{"step": 5, "torn')
    rewind_rl(settings(tiny_model, tmp_path))
    run(settings(tiny_model, tmp_path, trainer=trainer), resume=True)
    after = path.read_bytes().splitlines()
    assert after[: len(before)] == before and len(after) == 14


def test_told_to_stop_it_finishes_the_step_and_saves(tiny_model, samples, tmp_path) -> None:
    class Interrupt:
        def log(self, step, values) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def close(self) -> None:
            pass

    send(tmp_path, samples)
    own = settings(tiny_model, tmp_path)
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER)
    built = build_run(
        own, OrchestratorBatches(FilesystemReceiver(tmp_path)), journal, [Interrupt()], publishes=True
    )
    with pytest.raises(Stopped) as stopped, built.stop.listening():
        train(built)
    built.save_checkpoint()
    built.close()
    assert stopped.value.signal is signal.SIGTERM
    progress = newest_intact(tmp_path)
    assert progress is not None and progress.step == 4


def test_books_are_closed_before_the_model_is_written_and_before_metrics(
    tiny_model, samples, tmp_path, launcher
) -> None:
    found: dict[str, bool] = {}

    def note(name: str) -> None:
        found[name] = list(read_journal(tmp_path / "ledger" / "trainer.jsonl"))[-1].closed

    class Tracker:
        def log(self, step, values) -> None:
            note(f"step {step}")

        def close(self) -> None:
            note("close")

    send(tmp_path, samples)
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER)
    batches = OrchestratorBatches(FilesystemReceiver(tmp_path))
    own = settings(tiny_model, tmp_path, asynchronous=True, max_steps=3)
    built = build_run(own, batches, journal, [Tracker()], publishes=True)

    class Noted(type(built.trained)):
        def save(self, folder) -> None:
            note("model")
            super().save(folder)

    built.trained = Noted(**{each.name: getattr(built.trained, each.name) for each in fields(built.trained)})
    train(built)
    built.close()

    assert found == {"step 0": False, "step 1": False, "step 2": False, "model": True, "close": True}
    checkpoint = "writing the checkpoint of step 3"
    # A version that is still being written is waited for, which depends on how fast the machine is.
    doings = [doing for doing in launcher.doings() if doing != "publishing the weights"]
    assert doings == [
        checkpoint,  # begun
        checkpoint,  # waited for
        "writing the model",
        "closing its token export",
        "closing its metrics",
    ]
    assert newest_intact(tmp_path).step == 3


def test_a_trainer_says_that_it_finishes_its_step_and_how_long_that_may_take(launcher) -> None:
    stop = StopRequest()
    with stop.listening(lambda: say_finishing("step 7", 300.0)):
        os.kill(os.getpid(), signal.SIGTERM)
    word = launcher.hear()
    assert word.doing == "finishing step 7"
    assert word.silence_s == SILENCE_S + 600.0


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_batch_is_refused_and_a_good_one_waited_for(tiny_model, samples, tmp_path, damage) -> None:
    sender = FilesystemSender(tmp_path)
    send(tmp_path, samples)
    path = tmp_path / "batches" / "step_0" / "batch.bin"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:100])
    told: list[str] = []

    def orchestrate() -> None:
        """Hears of the refusal, as the real one does; then somebody brings a good batch."""
        while not told:
            try:
                sender.check()
            except TransportError as error:
                told.append(str(error))
            time.sleep(0.01)
        FilesystemSender(tmp_path).send(0, content)

    orchestrator = threading.Thread(target=orchestrate)
    orchestrator.start()
    arguments = ["--model.name", str(tiny_model), "--output-dir", str(tmp_path), "--trainer.threads", "1"]
    assert main(["trainer", *arguments, "--max-steps", "1"]) == 0
    orchestrator.join()
    assert told[0].startswith("the trainer refused the batch of step 0: ") and str(path) in told[0]
    assert told[0].endswith("; go on with --resume, which gives it up and samples the step anew")


def test_a_terminal_that_closes_stops_a_trainer_unless_that_is_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        stop = StopRequest()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Stopped):
                stop.check()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = StopRequest()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_a_wait_at_once_and_nothing_else() -> None:
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped):
            stop.check()
    stop = StopRequest()
    with stop.listening(), pytest.raises(Stopped), stop.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the wait went on")  # pragma: no cover
    with pytest.raises(Stopped), stop.interruptible():
        pytest.fail("a wait began after the signal")  # pragma: no cover


class SameAsPublished:
    """Notes every step whose published weights are, bit by bit, those of the trainer."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self.run = None
        self.steps: list[int] = []

    def log(self, step, values) -> None:
        self.run.finish_publishing()
        published = load_file(weights_folder(self._folder, step + 1) / "model.safetensors")
        own = self.run.policy.hf.state_dict()
        assert all(torch.equal(tensor, own[name]) for name, tensor in published.items())
        self.steps.append(step)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("rewound", [True, False], ids=["rewound", "the-trainer-alone"])
@pytest.mark.parametrize("crash_at", [1, 4], ids=["no-checkpoint", "checkpoint-3"])
def test_versions_beyond_the_checkpoint_are_withdrawn_and_made_again(
    tiny_model, samples, tmp_path, crash_at, rewound
) -> None:
    """With another learning rate they are other weights; none of the old ones is left to be served."""
    checkpoint = crash_at // 3 * 3
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(crash_at))
    newest = weights_folder(tmp_path, crash_at + 1) / "model.safetensors"
    before = newest.read_bytes()
    assert max(stable_steps(tmp_path / "weights")) == crash_at + 1 > checkpoint + 1
    own = settings(tiny_model, tmp_path, trainer={"threads": 1, "optim": {"lr": 5e-3}, "keep_weights": 9})
    if rewound:
        rewind_rl(own)
        assert max(stable_steps(tmp_path / "weights"), default=0) == checkpoint
    same = SameAsPublished(tmp_path)
    own = own.model_copy(update={"resume": True})
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER, resume=True)
    built = build_run(own, OrchestratorBatches(FilesystemReceiver(tmp_path)), journal, [same], publishes=True)
    same.run = built
    built.restore()
    assert max(stable_steps(tmp_path / "weights"), default=0) == checkpoint
    train(built)
    built.close()
    assert same.steps == list(range(checkpoint, NUM_STEPS))
    assert newest.read_bytes() != before


def test_evaluations_of_withdrawn_versions_are_taken_back(tiny_model, samples, tmp_path) -> None:
    """The version that the checkpoint has is still there, and so is what was measured of it."""
    send(tmp_path, samples)
    with pytest.raises(Crash):
        run(settings(tiny_model, tmp_path), CrashAt(4))
    for name in ("eval", "inference"):
        path = tmp_path / "metrics" / f"{name}.jsonl"
        path.write_text("".join(f'{{"step": {version}}}\n' for version in range(6)))
    rewind_rl(settings(tiny_model, tmp_path))
    left = {
        name: [record["step"] for record in read_metrics(tmp_path / "metrics" / f"{name}.jsonl")]
        for name in ("eval", "inference")
    }
    assert left == {"eval": [0, 1, 2, 3], "inference": [0, 1, 2]}
