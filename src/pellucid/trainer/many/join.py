"""`pellucid trainer` with `trainer.join`: has a run trained by a trainer that serves many."""

import logging
import time
from pathlib import Path

from pellucid.config import TrainerRunConfig
from pellucid.config.base import to_toml
from pellucid.data.model_folder import everywhere
from pellucid.ending import DISK_SILENCE_S, say
from pellucid.errors import ProcessError
from pellucid.trainer.many.roster import Roster, RunOutcome
from pellucid.trainer.stop import Stopped, StopRequest

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REMIND_S = 30.0


def join_trainer(config: TrainerRunConfig) -> None:
    """Returns once the run is trained; raises ProcessError, with the reason, if it ended earlier."""
    folder = config.trainer.join
    assert folder is not None
    roster, name = Roster(folder), config.run_name
    stop, stopped = StopRequest(), None
    with stop.listening(), roster.joined(name, to_toml(_absolute(config))):
        presence = _Presence(roster, folder, name)
        while (said := roster.outcome(name)) is None:
            try:
                stop.check()
            except Stopped as request:
                if stopped is None:
                    roster.leave(name)
                    say(f"waiting for the trainer in {folder} to save the run", silence_s=DISK_SILENCE_S)
                stopped = request
            if not presence.check() and stopped is not None:
                break
            time.sleep(_POLL_S)
    if stopped is not None:
        raise SystemExit(128 + stopped.signal)
    assert said is not None
    outcome, reason = said
    if outcome is not RunOutcome.DONE:
        raise ProcessError(f"run {name} was {outcome.value} by the trainer in {folder}: {reason}")


class _Presence:
    """Watches for the shared trainer: a run waits until it starts, and fails if it disappears."""

    def __init__(self, roster: Roster, folder: Path, name: str) -> None:
        self._roster = roster
        self._folder = folder
        self._name = name
        self._was_there = False
        self._reminded = -_REMIND_S

    def check(self) -> bool:
        is_there = self._roster.has_trainer()
        has_ended = self._roster.outcome(self._name) is not None  # a trainer says so before it goes
        if self._was_there and not is_there and not has_ended:
            raise ProcessError(
                f"the trainer in {self._folder} is gone; start it again, then go on with --resume"
            )
        if not is_there and time.monotonic() - self._reminded > _REMIND_S:
            self._reminded = time.monotonic()
            logger.warning("no trainer serves runs in %s yet; waiting for one", self._folder)
        self._was_there = is_there
        return is_there


def _absolute(config: TrainerRunConfig) -> TrainerRunConfig:
    """Makes paths absolute: the shared trainer runs in another folder."""
    model = config.model.model_copy(update={"name": everywhere(config.model.name)})
    return config.model_copy(
        update={"output_dir": config.output_dir.resolve(), "run_id": config.run_name, "model": model}
    )
