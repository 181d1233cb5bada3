"""Brings the folder of a run that died, or was stopped, back to one consistent point.

    checkpoint   the newest one that is intact; the trainer goes on with its step
    next_batch   the first batch from there on that is missing or damaged; the orchestrator goes on with it

Each part takes back what is its own, here as when it is resumed alone: the trainer by `checkpoint.take_back`,
the orchestrator by `orchestrator.resume`. What is left to do is what belongs to nobody alone: metrics of all
parts, exports of steps that will be sampled anew. Interrupted itself, it can be run again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from pellucid.checkpoint import newest_intact, take_back
from pellucid.config import (
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from pellucid.errors import ConfigError, LedgerError
from pellucid.launch.console import make_console
from pellucid.launch.run_folder import claimed, has_begun, keep_logs, prepare
from pellucid.ledger import State, reconcile, settle_engines
from pellucid.ledger.settings import Change, changed_settings
from pellucid.metrics import drop_metrics
from pellucid.orchestrator.resume import check_max_steps, settle_orchestrator
from pellucid.transport import retract_steps


@dataclass(frozen=True, slots=True)
class ResumePoint:
    checkpoint: int
    next_batch: int
    num_lost: int = 0
    """Tokens that were sampled and are gone."""

    num_rolled_back: int = 0
    """Tokens that were trained in steps that are discarded."""

    def __str__(self) -> str:
        """`resuming at step 50; 7 batches are trained from disk first; 312 sampled tokens were lost`."""
        parts = [f"resuming at step {self.checkpoint}"]
        if replayed := self.next_batch - self.checkpoint:
            parts.append(
                f"{replayed} {'batches are' if replayed > 1 else 'batch is'} trained from disk first"
            )
        if self.num_lost:
            parts.append(f"{self.num_lost:,} sampled tokens were lost")
        if self.num_rolled_back:
            parts.append(f"{self.num_rolled_back:,} trained tokens are rolled back")
        return "; ".join(parts)


Config = TypeVar("Config", bound=RunConfig)


def take_over(
    config: Config, rewind: Callable[[Config, Sequence[Change]], ResumePoint], console: Console
) -> tuple[Config, int]:
    """Returns the configuration of a run in its claimed folder, and the first step to train.

    `resume` is true from here on only if the folder holds a run; it is rewound then, and its logs are kept.
    Settings that a resumed run must not have are refused before any file of the run is touched.
    """
    changes = _changes(config) if has_begun(config.output_dir) else []
    config = config.model_copy(update={"resume": prepare(config)})
    if not config.resume:
        return config, 0
    point = rewind(config, changes)
    keep_logs(config.output_dir)
    console.out(str(point), highlight=False)
    for change in changes:
        since = point.next_batch if _shapes_batches(change.key) else point.checkpoint
        console.out(change.line(since), highlight=False)
    return config, point.checkpoint


def _changes(config: RunConfig) -> list[Change]:
    """Finds what a resumed run sets otherwise than before, each key once, though parts of it share some."""
    parts: dict[str, RunConfig] = {}
    if isinstance(config, RLConfig):
        _refuse_run_of(config, "sft")
        for name, kind in (("orchestrator", OrchestratorRunConfig), ("trainer", TrainerRunConfig)):
            parts[name] = config.part(kind)
    elif isinstance(config, SFTConfig):
        _refuse_run_of(config, "rl")
        parts["sft"] = config
    changes = [change for name, part in parts.items() for change in changed_settings(part, name)]
    return list({change.key: change for change in changes}.values())


def _refuse_run_of(config: RunConfig, command: str) -> None:
    if config.resume and (config.output_dir / "configs" / f"{command}.toml").exists():
        raise ConfigError(
            f"output_dir = {config.output_dir} holds a run of `pellucid {command}`, which another command "
            "cannot resume; choose another folder"
        )


def _shapes_batches(key: str) -> bool:
    """Whether a setting matters to the batches yet to be formed, not to those that are trained from disk."""
    return key.startswith(("orchestrator.", "inference.", "max_async_level"))


def run_rewind(config: RLConfig) -> None:
    """Only brings the folder back: for runs whose parts are started on their own."""
    with claimed(config.output_dir):
        config, _ = take_over(config.model_copy(update={"resume": True}), rewind_rl, make_console())
    if not config.resume:
        raise ConfigError(f"output_dir = {config.output_dir} holds no run that could be resumed")


def rewind_sft(config: RunConfig, changes: Sequence[Change] = ()) -> ResumePoint:
    progress = newest_intact(config.output_dir)
    checkpoint = progress.step if progress else 0
    check_max_steps(config, checkpoint, "trained")
    drop_metrics(config.output_dir / "metrics" / "trainer.jsonl", checkpoint)
    return ResumePoint(checkpoint, checkpoint)


def rewind_rl(
    config: TrainerRunConfig | OrchestratorRunConfig, changes: Sequence[Change] = ()
) -> ResumePoint:
    """Brings the folder back; `changes` are the settings that are others from here on.

    Each part settles its own when it is resumed, as here; but only while none is running can files that
    several of them write or read be put right.
    """
    folder = config.output_dir
    before = _given_up(folder)
    progress = newest_intact(folder)
    checkpoint = progress.step if progress else 0
    next_batch = settle_orchestrator(config, changes, checkpoint=checkpoint).batches_sent
    settle_engines(folder / "ledger")
    take_back(folder, progress)
    retract_steps(folder / "token_exports", next_batch)
    drop_metrics(folder / "metrics" / "trainer.jsonl", checkpoint)
    drop_metrics(folder / "metrics" / "orchestrator.jsonl", next_batch)
    drop_metrics(folder / "metrics" / "inference.jsonl", checkpoint)
    drop_metrics(folder / "metrics" / "eval.jsonl", checkpoint + 1)
    given_up = _given_up(folder) - before
    return ResumePoint(checkpoint, next_batch, given_up[State.LOST], given_up[State.ROLLED_BACK])


def _given_up(folder: Path) -> Counter[State]:
    """Tokens that processes that died took along, and those of discarded steps, as far as that is known."""
    try:
        report = reconcile(folder / "ledger")
    except LedgerError:  # there are no books yet
        return Counter()
    return Counter(
        {
            state: sum(states[state.value] for states in report.states.values())
            for state in (State.LOST, State.ROLLED_BACK)
        }
    )
