"""`pellucid COMMAND`: TOML + flags -> config -> one run(); nothing else.

Run functions are imported only when they run, so that `--help` and a typo are answered at once.
"""

import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, cast

from pellucid import __version__
from pellucid.config import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    SFTConfig,
    TrainerRunConfig,
    VerifyConfig,
)
from pellucid.config.base import Section, to_toml
from pellucid.config.imports import see_current_folder
from pellucid.config.parse import parse
from pellucid.config.tools import (
    DoctorSettings,
    EnvSettings,
    KeysSettings,
    LedgerSettings,
    PlanConfig,
    RenderConfig,
    ReplaySettings,
    TraceSettings,
    ViewSettings,
)
from pellucid.ending import QuickExit, say_failure
from pellucid.errors import ConfigError, DataError, DiskError, PellucidError, UserCodeError, printable


@dataclass(frozen=True)
class Command:
    config: type[Section]
    run: str
    """Import path of the function that is called with the config; it returns an exit code or None."""
    help: str
    reads_run: bool = False
    """Whether it reads what somebody's run left behind. It does not see modules of the current folder then,
    one of which could pose as a library. A file that it cannot read is an error of that folder, not a bug."""


COMMANDS: Mapping[str, Command] = {
    "rl": Command(RLConfig, "pellucid.launch.rl:run_rl", "train with rl: all processes on this machine"),
    "sft": Command(SFTConfig, "pellucid.launch.sft:run_sft", "fine-tune on a data set"),
    "trainer": Command(TrainerRunConfig, "pellucid.trainer:run_trainer", "the trainer of an rl run alone"),
    "orchestrator": Command(
        OrchestratorRunConfig,
        "pellucid.orchestrator:run_orchestrator",
        "the orchestrator of an rl run alone",
    ),
    "inference": Command(
        InferenceRunConfig,
        "pellucid.inference.server:run_inference",
        "the inference server of an rl run alone",
    ),
    "rewind": Command(
        RLConfig,
        "pellucid.launch.run_folder:run_rewind",
        "make a run's folder ready for its parts to be resumed",
        reads_run=True,
    ),
    "render": Command(
        RenderConfig, "pellucid.launch.render:run_render", "write the files that start a run on a cluster"
    ),
    "plan": Command(
        PlanConfig, "pellucid.launch.plan:run_plan", "what a run takes on GPUs that need not be here"
    ),
    "view": Command(
        ViewSettings, "pellucid.viewer:run_view", "see every token of a run in the browser", reads_run=True
    ),
    "trace": Command(
        TraceSettings,
        "pellucid.viewer.trace:run_trace",
        "write who worked and who waited, for Perfetto",
        reads_run=True,
    ),
    "ledger": Command(
        LedgerSettings, "pellucid.checks.ledger:run_ledger", "where every sampled token went", reads_run=True
    ),
    "replay": Command(
        ReplaySettings,
        "pellucid.checks.replay:run_replay",
        "recompute what was recorded, or what if",
        reads_run=True,
    ),
    "verify": Command(
        VerifyConfig,
        "pellucid.checks.verify:run_verify",
        "check packing, ranks, leakage, trainer against engine",
    ),
    "env": Command(
        EnvSettings,
        "pellucid.checks.try_environment:run_env",
        "try an environment alone: prompts, replies, rewards",
    ),
    "doctor": Command(
        DoctorSettings,
        "pellucid.checks.doctor:run_doctor",
        "collect what there is to know about this machine",
    ),
    "keys": Command(
        KeysSettings,
        "pellucid.transport.zmq_link:run_keys",
        "make keys for batches over a network",
        reads_run=True,
    ),
}


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run a command line.

    The exit code is 1 for a failed run, 2 for a wrong command line or config, 74 for a disk that is full.
    """
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv), commands)
    except PellucidError as error:
        say_failure(error)
        with suppress(OSError):  # of a log on a disk that is full
            if isinstance(error, UserCodeError) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print("error:", printable(str(error)).replace("\n", "\n       "), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run_and_exit() -> NoReturn:
    """Runs `main`, then exits the process, which no thread of an environment can hold up."""
    leaving = QuickExit()
    try:
        code = main()
    except SystemExit as told_to_stop:
        if not isinstance(told_to_stop.code, int):
            raise
        code = told_to_stop.code
    except Exception as error:
        say_failure(error)
        leaving.begin(1)
        raise
    leaving.begin(code)
    sys.exit(code)


def _dispatch(words: list[str], commands: Mapping[str, Command]) -> int:
    name, *rest = words or ["--help"]
    if name in commands:
        return _run(name, commands[name], rest)
    if name in ("-h", "--help"):
        print(_overview(commands))
    elif name == "--version":
        print(f"pellucid {__version__}")
    else:
        near = get_close_matches(name, commands, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see `pellucid --help`"
        raise ConfigError(f"{name}: unknown command; {remedy}")
    return 0


def _overview(commands: Mapping[str, Command]) -> str:
    return "\n".join(
        [
            "usage: pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]",
            "",
            *(f"  {name:<14}{command.help}" for name, command in commands.items()),
            "",
            "`pellucid COMMAND --help` shows every key; `--dry-run` checks, and prints the resolved config.",
        ]
    )


def _run(name: str, command: Command, argv: Sequence[str]) -> int:
    if not command.reads_run:
        see_current_folder()
    parsed = parse(command.config, argv, prog=f"pellucid {name}")
    if parsed.dry_run:
        config = cast(Section, _load("pellucid.launch.preflight:resolved")(parsed.config))
        print(to_toml(config), end="")
        for remark in cast(Sequence[str], _load("pellucid.launch.preflight:remarks")(parsed.config)):
            print(f"# {remark}")
        sys.stdout.flush()
        if not command.reads_run:
            _load("pellucid.launch.preflight:rehearse")(parsed.config)
        return 0
    _install_logging()
    try:
        return _load(command.run)(parsed.config) or 0
    except OSError as error:
        if error.errno not in DiskError.REMEDIES:
            reads_run = command.reads_run or getattr(parsed.config, "resume", False)
            if reads_run and error.filename is not None:
                raise DataError(f"{error.filename} cannot be read or written: {error.strerror}") from error
            raise
        raise DiskError.of(error, can_resume="resume" in command.config.model_fields) from error


def _load(import_path: str) -> Callable[[Any], int | None]:
    """Imports a function, without the garbage collector: it would walk the new modules again and again."""
    module, _, attribute = import_path.partition(":")
    gc.disable()
    try:
        imported = importlib.import_module(module)
    finally:
        gc.enable()
    return cast(Callable[[Any], int | None], getattr(imported, attribute))


def _install_logging() -> None:
    """Log to stderr: pellucid from PELLUCID_LOG_LEVEL (default INFO) on, everything else from WARNING on."""
    level = os.environ.get("PELLUCID_LOG_LEVEL", "INFO")
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ConfigError(f"PELLUCID_LOG_LEVEL = {level!r}: should be DEBUG, INFO, WARNING or ERROR")
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("pellucid").setLevel(known[level.upper()])


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


if __name__ == "__main__":
    run_and_exit()
