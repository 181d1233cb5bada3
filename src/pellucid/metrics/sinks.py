"""Where metrics go: the sinks of one process, as its configuration asks for them.

JSONL always: one flat record per step, readable while the run goes on. A JSONL file that cannot be written
stops the run: training without its record is worthless. Any other sink is a convenience and is `Guarded`: it
may fail, and the run goes on without it. What keeps a tracker from opening is the user's to settle before the
run starts, and a ConfigError; what happens to it later is only a warning.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from pellucid.config import PrometheusConfig, RunConfig, WandbConfig
from pellucid.data.files import append_whole, read_lines, read_whole, replace_file, require_own
from pellucid.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Process = Literal["trainer", "orchestrator", "inference", "eval"]
"""Who reports. Evaluations do so apart from the orchestrator: their steps are policy versions."""

FINISH_TIMEOUT_S = 60.0
"""wandb would wait for its upload for ever, and with it the end of the run; the rest stays on disk."""

_WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_ID_BYTES = 4096


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """`{"step": 3, "time": 1760000000.0, "loss": 0.1, …}` per line; a number that is not finite is null.

    A run that is resumed takes back what it wrote before of the first step that it logs, and after it.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_own(path)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._resumes = resume

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._resumes:
            drop_metrics(self._path, step)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._resumes = False
        record = {"step": step, "time": time.time(), **values}
        append_whole(self._file, orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        self._file.close()


class Guarded:
    """A sink that cannot stop the run: its first failure is reported, and after that nothing is logged to it.

    It is closed all the same, so that it gives back its files and ports.
    """

    def __init__(self, sink: Sink, key: str) -> None:
        self._sink = sink
        self._key = key
        self._failed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._failed:
            self._attempt(lambda: self._sink.log(step, values))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                failure = f"{self._key} failed and is switched off ({type(error).__name__}: {error})"
                logger.warning("%s; the run and its JSONL go on", failure)
            self._failed = True


class Tee:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class WandbSink:
    """Weights & Biases. Two processes cannot share one of its runs, so each has its own, in one group.

    Evaluations have one, too, in the orchestrator's process: their steps are policy versions, and the steps
    of one of its runs never go back. The id of each is kept in the run folder, so that a run that is
    continued there continues here.
    """

    def __init__(self, config: RunConfig, settings: WandbConfig, process: str) -> None:
        with optional_package("wandb"):
            import wandb
        folder = config.output_dir / "metrics"
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=f"{settings.name or config.run_name}/{process}",
                group=settings.group or config.run_name,
                job_type=process,
                id=stable_id(folder / "wandb" / f"{process}.id"),
                resume="allow",
                dir=folder,
                mode="offline" if settings.offline else None,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    reinit="create_new",
                    finish_timeout=FINISH_TIMEOUT_S,
                    finish_timeout_raises=True,
                ),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"monitors.wandb cannot start a run in project {settings.project!r} ({error}); "
                "run `wandb login`, check the network, or set monitors.wandb.offline"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def stable_id(path: Path) -> str:
    """Returns the id in `path`; a new one is written there first."""
    if not path.exists():
        replace_file(path, secrets.token_hex(8).encode())
    found = read_whole(path, _MAX_ID_BYTES).decode(errors="replace")
    if not _WANDB_ID.fullmatch(found):
        raise DataError(f"{path} holds no id of a wandb run; delete it, and wandb shows a new run")
    return found


class TensorboardSink:
    """TensorBoard's event files, written without torch: the orchestrator has none.

    A run that is resumed takes back the steps from the first that it logs on: TensorBoard hides them.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        with optional_package("tensorboard"):
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._writer = EventFileWriter(str(folder))
        self._resumes = resume

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._resumes:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=step, wall_time=time.time(), session_log=start))
            self._resumes = False
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
        # The writer's thread flushes every two minutes, and only a flush raises what went wrong in it.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sinks(config: RunConfig, process: Process, label: str | int = "") -> list[Sink]:
    """`metrics/PROCESS.jsonl`, then the trackers of `[monitors]`; if one cannot be opened, none stays open.

    `label` tells processes of one kind apart: `metrics/PROCESS_LABEL.jsonl`.
    """
    monitors = config.monitors
    name = f"{process}_{label}" if label else process
    sinks: list[Sink] = [JsonlSink(config.output_dir / "metrics" / f"{name}.jsonl", resume=config.resume)]
    try:
        if monitors.wandb is not None:
            sinks.append(Guarded(WandbSink(config, monitors.wandb, process), "monitors.wandb"))
        if monitors.tensorboard is not None:
            events = TensorboardSink(config.output_dir / "tensorboard" / process, resume=config.resume)
            sinks.append(Guarded(events, "monitors.tensorboard"))
        if monitors.prometheus is not None:
            sinks.append(Guarded(_open_prometheus(monitors.prometheus, process), "monitors.prometheus"))
    except BaseException:
        Tee(sinks).close()
        raise
    return sinks


def _open_prometheus(settings: PrometheusConfig, process: Process) -> Sink:
    from pellucid.metrics.prometheus import PrometheusSink  # half a second that most runs need not spend

    key = f"{process}_port"
    port = getattr(settings, key)
    try:
        return PrometheusSink(process, settings.host, port)
    except OSError as error:
        raise ConfigError(
            f"monitors.prometheus.{key} = {port} cannot be used on monitors.prometheus.host = "
            f"{settings.host} ({error.strerror}); choose another port or host"
        ) from error


@contextmanager
def optional_package(name: str) -> Iterator[None]:
    """Context manager: an import of a tracker's package that fails raises ConfigError with the remedy."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"monitors.{name} needs the package {name}, which cannot be imported ({error}); "
            f"run `pip install 'pellucid[{name}]'`, or leave the section out"
        ) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics file; a torn last line is left out."""
    for number, line in read_lines(path):
        if not line.endswith(b"\n"):
            return
        yield parse_metrics(f"{path}:{number}", line)


def parse_metrics(place: str, line: bytes) -> dict[str, Any]:
    """Returns one record: `step`, and numbers by their names, with null for those that are not finite."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place} is damaged: {error}; delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(f"{place} is no object with a step; delete that line")
    return record


def drop_metrics(path: Path, start: int) -> None:
    """Takes back the records from step `start` on, and a torn last line."""
    if path.exists():
        kept = [record for record in read_metrics(path) if record["step"] < start]
        replace_file(path, b"".join(orjson.dumps(record) + b"\n" for record in kept))
