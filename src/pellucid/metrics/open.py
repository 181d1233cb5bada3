"""The sinks of one process, as its configuration asks for them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from pellucid.config import PrometheusConfig, RunConfig, WandbConfig
from pellucid.errors import ConfigError
from pellucid.metrics.prometheus import PrometheusSink
from pellucid.metrics.sinks import Guarded, JsonlSink, Sink

Process = Literal["trainer", "orchestrator", "inference", "eval"]
"""Who reports. Evaluations do so apart from the orchestrator: their steps are policy versions."""


def open_sinks(config: RunConfig, process: Process, label: str | int = "") -> list[Sink]:
    """`metrics/PROCESS.jsonl`, then the trackers of `[monitors]`; if one cannot be opened, none stays open.

    `label` tells processes of one kind apart: `metrics/PROCESS_LABEL.jsonl`.

    What keeps a tracker from opening is the user's to settle before the run starts, and a ConfigError; what
    happens to it later is only a warning.
    """
    with ExitStack() as opened:
        sinks: list[Sink] = []
        for open_sink in _openers(config, process, label):
            sinks.append(open_sink())
            opened.callback(sinks[-1].close)
        opened.pop_all()
    return sinks


def _openers(config: RunConfig, process: Process, label: str | int) -> Iterator[Callable[[], Sink]]:
    monitors = config.monitors
    name = f"{process}_{label}" if label else process
    yield lambda: JsonlSink(config.output_dir / "metrics" / f"{name}.jsonl", resume=config.resume)
    if (wandb := monitors.wandb) is not None:
        yield lambda: Guarded(_open_wandb(config, wandb, process), "monitors.wandb")
    if monitors.tensorboard is not None:
        yield lambda: Guarded(_open_tensorboard(config, process), "monitors.tensorboard")
    if (prometheus := monitors.prometheus) is not None:
        yield lambda: Guarded(_open_prometheus(prometheus, process), "monitors.prometheus")


def _open_wandb(config: RunConfig, settings: WandbConfig, process: Process) -> Sink:
    with _optional_package("wandb"):
        from pellucid.metrics.wandb_sink import WandbSink
    return WandbSink(config, settings, process)


def _open_tensorboard(config: RunConfig, process: Process) -> Sink:
    with _optional_package("tensorboard"):
        from pellucid.metrics.tensorboard_sink import TensorboardSink
    return TensorboardSink(config.output_dir / "tensorboard" / process, resume=config.resume)


def _open_prometheus(settings: PrometheusConfig, process: Process) -> Sink:
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
def _optional_package(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"monitors.{name} needs the package {name}, which cannot be imported ({error}); "
            f"run `pip install 'pellucid[{name}]'`, or leave the section out"
        ) from error
