"""`pellucid rl`: inference, orchestrator and trainer as processes under one supervisor; a teacher, too.

    check ─> resolve (port, threads) ─> prepare or rewind the folder ─> write configs ─> supervise ─> summary

Trainer and orchestrator end by themselves after `max_steps`; the launcher then stops the inference server and
the teacher's. The processes find each other through their configs and the run folder; the launcher only
watches.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from io import FileIO
from pathlib import Path

from rich.console import Console

from pellucid.config import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    TrainerRunConfig,
)
from pellucid.config.base import save
from pellucid.data.files import append_whole
from pellucid.errors import DiskError, LedgerError, ProcessError
from pellucid.launch.console import (
    RL_COLUMNS,
    STOPPED,
    TEACHER_COLUMN,
    AlarmFollower,
    JsonlFollower,
    PlainView,
    StepColumn,
    StepJoin,
    StepView,
    make_console,
    number_in,
    open_view,
    rl_summary,
)
from pellucid.launch.gpus import NO_GPUS, VISIBLE, Placement, place, visible_gpus, with_placement
from pellucid.launch.preflight import check_rl, free_port, resolve
from pellucid.launch.run_folder import claimed, has_begun, noting_outcome, rewind_rl, settle_export, take_over
from pellucid.launch.supervisor import Child, supervise
from pellucid.ledger import Report, reconcile
from pellucid.metrics import parse_metrics
from pellucid.metrics.evaluation import evaluation_line, evaluations_in
from pellucid.orchestrator.records import progress_path, read_progress
from pellucid.workers import num_cores

REPORTERS = ("orchestrator", "trainer")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_rl(config: RLConfig) -> None:
    placement = place(config, visible_gpus(os.environ))
    check_rl(with_placement(config, placement))
    config = resolve(config, num_cores(), placement)
    console = make_console()
    for line in placement.lines():
        console.out(line, highlight=False)
    with claimed(config.output_dir):
        settle_export(config, console)
        config, start = take_over(config, rewind_rl, console)
        write_configs(config)
        with noting_outcome(config.output_dir):
            run_processes(config, rl_children(config, placement), console, start=start)


def write_configs(config: RLConfig) -> None:
    """Writes the configuration as resolved, whole and as each process of the run sees it."""
    for name, part in {"rl": config, **parts(config)}.items():
        save(part, config_path(config, name))


def parts(config: RLConfig) -> dict[str, RunConfig]:
    """Returns the configuration of each process of the run, by its name."""
    config = config.model_copy(update={"clean_output_dir": False})
    configs: dict[str, RunConfig] = {
        **_servers(config),
        "orchestrator": config.part(OrchestratorRunConfig),
        "trainer": config.part(TrainerRunConfig),
    }
    teacher = config.orchestrator.teacher
    if teacher is not None and teacher.model is not None:
        server = {
            "port": teacher.port,
            "role": "teacher",
            "record_experts": False,
            "record_expert_weights": False,
            "servers": (),
        }
        configs["teacher"] = config.part(
            InferenceRunConfig,
            model={**config.model.model_dump(), "name": teacher.model},
            inference={**config.inference.model_dump(), **server},
            monitors={},  # a tracker has one page for the inference server, the policy's
        )
    return configs


def _servers(config: RLConfig) -> dict[str, RunConfig]:
    """Returns the configuration of each server of the policy; one, or those in `inference.servers`."""
    if not config.inference.servers:
        return {"inference": config.part(InferenceRunConfig)}
    ports = [int(url.rpartition(":")[2]) for url in config.inference.servers]
    threads = max(1, (config.inference.threads or 1) // len(ports))
    own = {**config.inference.model_dump(), "servers": (), "threads": threads}
    return {
        server_name(number): config.part(
            InferenceRunConfig,
            inference={**own, "port": port, "replica": number},
            # a tracker has one page for the inference server, the first
            **({"monitors": {}} if number else {}),
        )
        for number, port in enumerate(ports)
    }


def config_path(config: RLConfig, name: str) -> Path:
    return config.output_dir / "configs" / f"{name}.toml"


def rl_children(config: RLConfig, placement: Placement = NO_GPUS) -> list[Child]:
    """Returns the processes of a run; with GPUs, each sees those that are its own."""
    num_trainers = config.trainer.num_processes
    threads = {"trainer": max(1, (config.trainer.threads or 1) // num_trainers)}
    gpus = {"trainer": placement.trainer, "teacher": placement.teacher}
    gpus |= {server_name(number): own for number, own in enumerate(placement.servers)}
    children = []
    for part, settings in parts(config).items():
        command, python, num_threads = part, sys.executable, threads.get(part)
        if serves := isinstance(settings, InferenceRunConfig):
            command, num_threads = "inference", settings.inference.threads
            python = str(config.inference.python or python)
        argv = (python, "-m", "pellucid.cli", command, "@", str(config_path(config, part)))
        env = dict.fromkeys(THREAD_VARIABLES, str(num_threads or 1))
        if placement.servers:
            env[VISIBLE] = ",".join(gpus.get(part, ()))  # none for the orchestrator
        # A trainer on GPUs has a process group even alone: one GPU and several run the same code.
        joins = places(num_trainers, always=bool(placement.trainer)) if part == "trainer" else [{}]
        for number, place_of in enumerate(joins):
            name = f"{part}_{number}" if number else part
            log_path = config.output_dir / "logs" / f"{name}.log"
            child_env = {**env, "TOKENIZERS_PARALLELISM": "false", **place_of}
            children.append(Child(name, argv, log_path, child_env, service=serves))
    return children


def server_name(number: int) -> str:
    """Names a server of the policy: `inference`, `inference_1`, …"""
    return f"inference_{number}" if number else "inference"


def places(num_processes: int, *, always: bool = False) -> list[dict[str, str]]:
    """Returns the environment variables that torchrun would set for each process; none for a single one.

    `always` sets them for a single one, too. The supervisor starts these processes itself, so that none
    outlives the run, and the log of the one that failed contains the reason.
    """
    if num_processes == 1 and not always:
        return [{}]
    size = str(num_processes)
    shared = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1", 0)),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(num_processes)]


def run_processes(config: RLConfig, children: Sequence[Child], console: Console, *, start: int = 0) -> None:
    """Runs `children` to their end, showing the steps from `start` on, then judges the ledger and sums up."""
    started = time.monotonic()
    folder = config.output_dir
    console.out(f"{config.run_name}: {config.max_steps:,} steps; logs in {folder / 'logs'}", highlight=False)
    try:
        progress = _supervise(config, children, console, start)
    except SystemExit:  # told to stop
        console.out(STOPPED)
        raise
    report = reconcile(folder / "ledger")
    summary = rl_summary(
        config.run_name,
        time.monotonic() - started,
        progress.num_steps,
        progress.rewards,
        report,
        folder,
        console.width,
        evaluations=progress.evaluations,
        num_packed=progress.num_packed,
        is_resumed=start > 0,
    )
    console.print(summary)
    _require_balance(report, folder)


def _supervise(config: RLConfig, children: Sequence[Child], console: Console, start: int) -> "StepProgress":
    log_path = config.output_dir / "logs" / "rl.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    shown = columns(config)
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("wb", buffering=0))
        view = stack.enter_context(closing(open_view(shown, config.max_steps - start, console)))
        in_log = PlainView(shown, partial(_log_line, log))
        progress = StepProgress(config.output_dir / "metrics", [view, in_log], start)
        # Whatever ends the run, the steps written until then are shown.
        stack.callback(progress.update)
        try:
            supervise(children, on_tick=progress.update, say=console.out)
        except (DiskError, ProcessError) as error:
            again = "start again with the same command"
            if has_begun(config.output_dir):
                again = "go on with the same command and --resume"
            raise type(error)(f"{error}\nonce that is mended, {again}") from error
    return progress


def columns(config: RLConfig) -> list[StepColumn]:
    """Returns the columns shown per step; with a teacher that scores, its column replaces `off-policy`."""
    teacher = config.orchestrator.teacher
    scores = teacher is not None and teacher.mode != "sft"
    return [TEACHER_COLUMN if scores and each.title == "off-policy" else each for each in RL_COLUMNS]


def _log_line(log: FileIO, line: str) -> None:
    """Writes a line to the log; a full disk only drops it, since other processes end the run then."""
    with suppress(OSError):
        append_whole(log, f"{line}\n".encode())


class StepProgress:
    """Follows what the processes report, and shows each step once all of `REPORTERS` have reported it.

    Evaluations are shown as they come; those of the run that is resumed are known, but not shown again.
    """

    def __init__(self, metrics_dir: Path, views: Sequence[StepView], start: int = 0) -> None:
        self._followers = [JsonlFollower(metrics_dir / f"{name}.jsonl", parse_metrics) for name in REPORTERS]
        self._join = StepJoin(len(self._followers))
        self._evaluated = JsonlFollower(metrics_dir / "eval.jsonl", parse_metrics)
        self._alarms = AlarmFollower(metrics_dir.parent)
        self._progress = progress_path(metrics_dir.parent)
        self._progress.unlink(missing_ok=True)  # of the run that is resumed
        self._views = views
        self._start = start
        self.num_steps = 0
        self.num_packed = 0
        """Tokens that the trainer took in from `start` on."""
        self.rewards: list[float] = []
        self.evaluations = self._evaluated.read()

    def update(self) -> None:
        records = [
            record
            for source, follower in enumerate(self._followers)
            for record in self._join.add(source, follower.read())
        ]
        for record in records:
            self.num_steps += 1
            if (reward := number_in(record, "reward/all")) is not None:
                self.rewards.append(reward)
            if record["step"] >= self._start:
                self.num_packed += record["tokens"] - record["padding_tokens"]
                for view in self._views:
                    view.show(record)
        evaluated = self._evaluated.read()
        self.evaluations += evaluated
        notes = [
            evaluation_line(record["step"], name, measures)
            for record in evaluated
            for name, measures in evaluations_in(record).items()
        ]
        notes += [alarm.line() for alarm in self._alarms.read()]
        progress = read_progress(self._progress)
        for view in self._views:
            for note in notes:
                view.note(note)
            view.status([] if progress is None else progress.lines())
            view.refresh()


def _require_balance(report: Report, folder: Path) -> None:
    if report.differences:
        tokens = sum(abs(difference.tokens) for difference in report.differences)
        raise LedgerError(f"{tokens:,} tokens are unaccounted for; see `pellucid ledger {folder}`")
    if report.running:
        names = ", ".join(stage.value for stage in report.running)
        raise LedgerError(
            f"the journal of {names} was not closed, so the ledger cannot be judged; "
            f"see `pellucid ledger {folder}`"
        )
