"""Damaged and hostile run folders, given to every command that goes on with a run.

It says in one line what is wrong with which file, or goes on without it. There is no traceback, nobody waits
for a pipe, and nothing is written through a link: what lies outside of the folder stays as it was.

    rl             the launcher; scheduler, books, channel and trainer of `SmallRun` for its processes
    sft, trainer   as they are
    orchestrator   with a server inside of the process
    inference      up to where it would serve
"""

import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostile import bounded, instead, linked_away, outside, replaced, sparse
from pellucid.cli import COMMANDS, Command, main
from pellucid.config import OrchestratorRunConfig, RLConfig
from pellucid.config.base import save
from pellucid.data import TokenTable, TrainingSample
from pellucid.inference.fake import FakeInferenceClient
from pellucid.launch import rl
from pellucid.launch.supervisor import Child
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Orchestrator, load_environment
from pellucid.orchestrator.servers import connect_policy
from pellucid.transport import Batch, FilesystemSender, encode_batch, open_sender
from small_run import MAX_STEPS, SOURCES, SmallRun, stop_after_four_steps

pytestmark = pytest.mark.slow

WORDS = ("abc", "xyz", "hello", "world")


def orchestrate(config: OrchestratorRunConfig) -> None:
    """As `run_orchestrator` does it, but for the server."""
    environments = {env.label: load_environment(env, config.seed) for env in config.orchestrator.env}
    tokenizer = character_tokenizer()

    def reply(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        text = "".join(generator.choices("abcdef ", k=6))
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    async def run() -> None:
        await connect_policy(config, tokenizer, {}).close()
        sender = open_sender(config.transport, config.output_dir, config.run_name)
        await Orchestrator(config, environments, tokenizer, FakeInferenceClient(reply), sender).run()

    asyncio.run(run())


def settings_of(folder: Path, model: Path) -> RLConfig:
    return RLConfig.model_validate(
        {
            "output_dir": folder,
            "run_id": "run",
            "model": {"name": str(model)},
            "max_steps": MAX_STEPS,
            "max_async_level": MAX_STEPS,
            "seq_len": 200,
            "resume": True,
            "trainer": {
                "threads": 1,
                "keep_weights": 2 * MAX_STEPS,
                "ckpt": {"interval": 2},
                "experimental": {"token_export": {}},
            },
            "orchestrator": {
                "env": [{"id": "reverse-text", "name": source.env_name} for source in SOURCES],
                "batch_size": 2,
                "rollouts_per_example": 2,
            },
        }
    )


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of real parts that was stopped after four steps."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    stop_after_four_steps(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's run that has trained two of the four batches that are there."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    generator = random.Random(0)
    for step in range(4):
        samples = [
            TrainingSample.from_turn(
                [generator.randrange(5, 101) for _ in range(4)],
                [generator.randrange(5, 101) for _ in range(6)],
                [-4.0] * 6,
                env_name="math",
                run_id="run",
                reward=float(index),
                advantage=index - 0.5,
            )
            for index in range(2)
        ]
        batch = Batch("run", step, TokenTable.from_samples(samples))
        FilesystemSender(folder).send(step, encode_batch(batch))
    config = settings_of(folder, tiny_model).model_copy(update={"resume": False, "max_steps": 2})
    assert resume("trainer", config) == 0
    return folder


@pytest.fixture(scope="module")
def tuned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuning that has done two steps."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    chats = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}] for word in WORDS
    ]
    data = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder.parent / "data.jsonl").write_text(data)
    assert tune(folder, tiny_model, folder.parent / "data.jsonl", max_steps=2) == 0
    return folder


def tune(folder: Path, model: Path, data: Path, max_steps: int = 3) -> int:
    return main(
        [
            *("sft", "--model.name", str(model), "--output-dir", str(folder), "--data.path", str(data)),
            *("--data.batch-size", "2", "--seq-len", "64", "--trainer.threads", "1", "--run-id", "run"),
            *("--trainer.experimental.token-export.format", "jsonl", "--resume"),
            *("--trainer.ckpt.interval", "2", "--max-steps", str(max_steps)),
        ]
    )


def resume(name: str, config: RLConfig) -> int:
    """Runs a command as a user would; the orchestrator's is `orchestrate`."""
    commands = {**COMMANDS, "orchestrator": Command(OrchestratorRunConfig, f"{__name__}:orchestrate", "")}
    settings = config.output_dir.parent / f"{name}.toml"
    save(config if name == "rl" else config.part(commands[name].config), settings)
    with stopped_when("refused the batch", "resumed at step 0"):
        try:
            return main([name, "@", str(settings)], commands)
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            return stopped.code


@contextmanager
def stopped_when(*logged: str) -> Iterator[None]:
    """A trainer that lacks a batch waits for an orchestrator, which is not there: it is told to stop."""

    class Stop(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if any(text in record.getMessage() for text in logged):
                os.kill(os.getpid(), signal.SIGTERM)

    handler = Stop()
    logging.getLogger().addHandler(handler)  # after those that keep what is logged
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def finish_small_run(children: Sequence[Child], on_tick: Callable[[], None], say: object) -> None:
    """Stands for the processes of a run."""
    on_tick()
    SmallRun(children[0].log_path.parents[1], resume=True).finish()
    on_tick()


Damage = Callable[[Path], object]


def each_of(names: Sequence[str], change: Callable[[str], Damage]) -> Damage:
    """The same done to several files."""
    return lambda run: [change(name)(run) for name in names]


def each_in(pattern: str, change: Callable[[str], Damage]) -> Damage:
    """The same done to all that match; some have to."""

    def damage(run: Path) -> None:
        found = [str(path.relative_to(run)) for path in run.glob(pattern)]
        assert found
        each_of(found, change)(run)

    return damage


def linked(*names: str) -> Damage:
    """Links under these names to a file of somebody else."""

    def link(run: Path) -> None:
        (run.parent / "outside").mkdir(exist_ok=True)
        precious = run.parent / "outside" / "precious"
        precious.write_text("precious\n")
        for name in names:
            instead(name, lambda path: path.symlink_to(precious))(run)

    return link


def folder(name: str) -> Damage:
    return instead(name, Path.mkdir)


def pipe(name: str) -> Damage:
    return instead(name, os.mkfifo)


JOURNALS = tuple(f"ledger/{name}.jsonl" for name in ("inference", "orchestrator", "trainer"))
METRICS = tuple(f"metrics/{name}.jsonl" for name in ("trainer", "orchestrator", "eval"))
LOCK = ".token_exports.lock"
PARTIALS = (
    "checkpoints/.orchestrator.bin.partial",
    "checkpoints/.identity.partial",
    "ledger/.trainer.jsonl.partial",
    "ledger/.orchestrator.jsonl.partial",
    "metrics/.trainer.jsonl.partial",
    "metrics/.progress.json.partial",
    "token_exports/step_2/.rank_0.jsonl.partial",
    "token_exports/step_2/.summary.rank_0.json.partial",
    *(f"configs/.{name}.toml.{os.getpid()}" for name in ("rl", "sft", "trainer", "orchestrator")),
)
"""What a run writes before it renames it."""

ALL = ("rl", "sft", "trainer", "orchestrator")
PARTS = ("rl", "trainer", "orchestrator", "inference")
PIPE = "is a pipe, socket or device, where a file is expected"
FOLDER = "is a folder, where a file is expected"
LINK = "is a link, and a run changes only files of its own"

Expected = Mapping[str, str]
"""What each command that is given the folder says of it; "" if it goes on."""


def said(text: str, *names: str) -> Expected:
    return dict.fromkeys(names, text)


def goes_on(*names: str) -> Expected:
    return dict.fromkeys(names, "")


DAMAGES: dict[str, tuple[Damage, Expected]] = {
    "nothing": (lambda run: None, goes_on(*ALL)),
    # --- small files
    "key: a pipe": (pipe("key"), said("key cannot be read (it is no file)", "orchestrator", "inference")),
    "key: a folder": (folder("key"), said("key cannot be read (it is no file)", "orchestrator")),
    "key: not ASCII": (
        replaced("key", b"\xff" * 20),
        said("key cannot be read (it is not ASCII)", "orchestrator"),
    ),
    "key: no word": (replaced("key", b"two words and more"), said("key holds no key", "orchestrator")),
    "key: a sparse gigabyte": (instead("key", sparse), said("key holds no key", "orchestrator")),
    "key: a loop of links": (
        instead("key", lambda path: path.symlink_to(path.name)),
        said("key cannot be read (Too many levels", "orchestrator"),
    ),
    "identity: a pipe": (pipe("checkpoints/identity"), said(PIPE, "orchestrator")),
    "identity: escape codes": (
        replaced("checkpoints/identity", b"\x1b]0;x\x07"),
        said("identity is damaged: it holds no name", "orchestrator"),
    ),
    "identity: not UTF-8": (replaced("checkpoints/identity", b"\xff"), goes_on("orchestrator")),
    "identity: a sparse gigabyte": (
        instead("checkpoints/identity", sparse),
        said("such a file has at most 4,096", "orchestrator"),
    ),
    "lock: a pipe": (pipe(".lock"), said(PIPE, "rl", "sft")),
    "lock: a folder": (folder(".lock"), said(FOLDER, "rl")),
    "lock: a link": (linked(".lock"), said(".lock is a link, where a file is expected", "rl", "sft")),
    "lock: a link that leads nowhere": (
        instead(".lock", lambda path: path.symlink_to("../new")),
        said(".lock is a link, where a file is expected", "rl"),
    ),
    "progress: a pipe": (pipe("metrics/progress.json"), goes_on("rl", "orchestrator")),
    "progress: a folder": (
        folder("metrics/progress.json"),
        {"rl": "progress.json cannot be read or written: ", "orchestrator": ""},
    ),
    "progress: binary": (replaced("metrics/progress.json", b"\xff{"), goes_on("rl")),
    "alarms: a pipe": (pipe("metrics/alarms.jsonl"), said(PIPE, "rl", "sft")),
    "alarms: a folder": (folder("metrics/alarms.jsonl"), said(FOLDER, "rl")),
    "alarms: binary": (replaced("metrics/alarms.jsonl", b"\xff\n{}\n[[["), goes_on("rl")),
    "alarms: a sparse gigabyte": (
        instead("metrics/alarms.jsonl", sparse),
        said("has more than 67,108,864 bytes, which no line has", "rl"),
    ),
    # --- records
    "metrics: words for numbers": (
        replaced("metrics/trainer.jsonl", b'{"step": 0, "loss": "x", "tokens": [], "time/step_s": {}}\n'),
        goes_on("sft"),
    ),
    "metrics: words for numbers of every part": (
        each_of(
            METRICS, lambda name: replaced(name, b'{"step": 0, "reward/all": "x", "eval/q/avg@1": []}\n')
        ),
        goes_on("rl", "orchestrator"),
    ),
    "metrics: pipes": (each_of(METRICS, pipe), said(PIPE, *ALL)),
    "ledger: folders": (each_of(JOURNALS, folder), said(FOLDER, *PARTS)),
    "ledger: pipes": (each_of(JOURNALS, pipe), said(PIPE, *PARTS)),
    "ledger: binary": (
        each_in("ledger/*.jsonl", lambda name: replaced(name, b"\xff\n")),
        said("is not a ledger entry", "rl", "trainer"),
    ),
    "ledger: a file for the folder": (
        instead("ledger", Path.touch),
        said("ledger cannot be read or written: File exists", "rl", "trainer", "orchestrator"),
    ),
    "settings: pipes": (
        each_of([f"configs/step_0/{name}.toml" for name in ("trainer", "orchestrator")], pipe),
        said(PIPE, "rl", "trainer", "orchestrator"),
    ),
    # --- checkpoints, weights, batches
    "checkpoint: pipes": (
        each_in("checkpoints/step_*/state/*", pipe),
        {"rl": "", "sft": "", "trainer": "is passed over"},
    ),
    "checkpoint: progress that is a pipe": (
        each_in("checkpoints/step_*/progress.json", pipe),
        {"rl": "", "trainer": "is passed over"},
    ),
    "checkpoint: STABLE that is a folder": (
        lambda run: [
            each_in("checkpoints/step_*/STABLE", folder)(run),
            each_in("checkpoints/step_*/progress.json", lambda name: replaced(name, b"{"))(run),
        ],
        said("STABLE cannot be read or written: ", "rl", "trainer", "sft"),
    ),
    "snapshot: pipes": (each_in("checkpoints/orchestrator*.bin", pipe), said(PIPE, "rl", "orchestrator")),
    "weights: pipes": (each_in("weights/step_*/*.safetensors", pipe), goes_on("rl", "trainer")),
    "weights: digests that are damaged": (
        each_in("weights/step_*", lambda name: replaced(f"{name}/digests.json", b"{")),
        goes_on("rl", "trainer"),
    ),
    "weights: digests that are pipes": (
        each_in("weights/step_*", lambda name: pipe(f"{name}/digests.json")),
        goes_on("rl", "trainer"),
    ),
    "weights: STABLE that is a folder": (each_in("weights/step_*/STABLE", folder), goes_on("rl")),
    "batches: pipes": (
        each_in("batches/step_*/batch.bin", pipe),
        {"rl": "", "orchestrator": "", "trainer": "refused the batch of step 2"},
    ),
    "batches: folders": (
        each_in("batches/step_*/batch.bin", folder),
        {"rl": "", "trainer": "refused the batch of step 2"},
    ),
    "batches: links that lead nowhere": (
        each_in("batches/step_*/batch.bin", lambda name: instead(name, lambda path: path.symlink_to("gone"))),
        said("refused the batch of step 2", "trainer"),
    ),
    "batches: refusals under odd names": (
        each_of(
            [f"batches/refused_step_{name}/reason.txt" for name in ("x", "²", "-1", "007")],
            lambda name: instead(name, lambda path: path.write_bytes(b"\xff")),
        ),
        goes_on("rl", "orchestrator"),
    ),
    "batches: a refusal that is a link": (
        lambda run: [linked()(run), (run / "batches/refused_step_5").symlink_to(run.parent / "outside")],
        goes_on("rl", "orchestrator"),
    ),
    # --- who may write where
    "export: a lock that is a pipe": (pipe(LOCK), said(PIPE, "rl", "sft", "trainer")),
    "export: a lock that is a link": (
        linked(LOCK),
        said(f"{LOCK} is a link, where a file is expected", "rl", "sft", "trainer"),
    ),
    "export: a lock of NUL bytes": (
        replaced(LOCK, bytes(9)),
        said(f"{LOCK} is damaged: it names no run folder", "rl", "trainer"),
    ),
    "links: half-written files": (linked(*PARTIALS), goes_on(*ALL)),
    "links: ledger": (linked_away("ledger/*.jsonl"), said(LINK, *PARTS)),
    "links: metrics": (
        linked(*METRICS, "metrics/alarms.jsonl"),
        {"sft": "is damaged", "trainer": LINK, "orchestrator": LINK},
    ),
    "links: rollouts": (
        linked(*(f"rollouts/step_{step}/train_rollouts.jsonl" for step in range(MAX_STEPS))),
        said(LINK, "rl", "orchestrator"),
    ),
    "links: settings": (linked_away("configs/step_*/*.toml"), goes_on("trainer")),
    "links: logs": (linked("logs/rl.log", "logs/trainer.log"), goes_on("rl")),
}
"""What is done to a folder, and what comes of it."""

CASES = [(damage, name) for damage, (_, expected) in DAMAGES.items() for name in expected]


@pytest.mark.parametrize(("damage", "name"), CASES, ids=[f"{damage}-{name}" for damage, name in CASES])
def test_no_folder_does_harm_to_who_goes_on_with_it(
    request, tiny_model, tmp_path, monkeypatch, capfd, caplog, damage, name
) -> None:
    template = request.getfixturevalue({"sft": "tuned", "trainer": "trained"}.get(name, "sampled"))
    run = Path(shutil.copytree(template, tmp_path / "run"))
    config = settings_of(run, tiny_model)
    if name == "trainer":
        config = config.model_copy(update={"max_steps": 4})
    if name == "inference":
        port = rl.free_port("127.0.0.1", 0)
        config = config.model_copy(update={"inference": config.inference.model_copy(update={"port": port})})
    monkeypatch.setattr(rl, "supervise", finish_small_run)
    change, expected = DAMAGES[damage]
    change(run)
    before = outside(run)
    capfd.readouterr()
    with bounded():
        data = template.parent / "data.jsonl"
        code = tune(run, tiny_model, data) if name == "sft" else resume(name, config)
    printed = capfd.readouterr()
    assert outside(run) == before
    assert not (tmp_path / "new").exists()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed.out + printed.err)
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    if code == 128 + signal.SIGTERM:
        assert name == "trainer" and expected[name] in caplog.text
    elif expected[name]:
        assert code in (1, 2) and len(errors) == 1 and expected[name] in errors[0], printed.err
    else:
        assert code == 0 and not errors, printed.err
