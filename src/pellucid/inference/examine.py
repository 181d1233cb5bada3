"""Decides whether a run may use a server, and whether the server makes progress. Pure.

what differs             policy                                      teacher
key                      refused                                     refused where it is needed
vocabulary               refused                                     refused
max_model_len            refused if it is less than the run's        the same
the model that it loaded refused, where both sides can tell          anything goes
the weights that it has  those it loaded, or this run's; any         anything goes
                         other run's are refused
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pellucid.errors import ConfigError
from pellucid.inference.protocol import Access, Health


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the servers of a run, checked at the start, at every update and on a return."""

    role: str
    """`policy server` or `teacher`, for messages."""

    model: str
    """`model.name` of the run."""

    vocabulary: str
    """Fingerprint of the tokenizer that the run uses."""

    max_model_len: int
    access: Access = "all"
    """Access that the run needs: `sampling` is enough for a teacher that only scores."""

    key_setting: str = "inference.key_file"
    """Which setting names the server's key, for messages."""

    run: str | None = None
    """Identity of the run; None for a teacher, which may serve any weights."""

    model_fingerprint: str = ""
    """Fingerprint of the model at `model`; "" where this machine does not have its weights."""

    has_weights: bool = False
    """Whether the run has published weights: a server that serves another version of it can load them."""

    def check(self, url: str, health: Health) -> None:
        """Raises ConfigError with both values and the remedy if the server at `url` is not the run's."""
        who = f"the {self.role} {health.model!r} at {url}"
        if health.access not in ("all", self.access):
            raise ConfigError(
                f"{who} was started with another key than this run shows; start it with the run's "
                f"output_dir, or set {self.key_setting} to the file `key` in the folder that it was started "
                "with"
            )
        if health.vocabulary != self.vocabulary:
            raise ConfigError(other_vocabulary(who, f"model.name = {self.model!r}"))
        if health.max_model_len < self.max_model_len:
            raise ConfigError(
                f"{who} takes {health.max_model_len} tokens, less than inference.max_model_len = "
                f"{self.max_model_len}; start it with a larger inference.max_model_len, or lower that of the "
                "run"
            )
        if self.run is not None:
            self._check_model(who, health)
            self._check_weights(who, health, self.run)

    def _check_model(self, who: str, health: Health) -> None:
        known = health.model_fingerprint and self.model_fingerprint
        if known and health.model_fingerprint != self.model_fingerprint:
            raise ConfigError(
                f"{who} was started with another model (weights {health.model_fingerprint}) than model.name "
                f"= {self.model!r} (weights {self.model_fingerprint}); start it with the run's model, or set "
                "model.name to its"
            )

    def _check_weights(self, who: str, health: Health, run: str) -> None:
        version = health.policy_version
        if health.run != run and (health.run or version):
            whose = f"run {health.run!r}" if health.run else "a run that it cannot name"
            raise ConfigError(
                f"{who} serves policy version {version} of {whose}, not of this run, {run!r}; if that run is "
                "going on, give this one a server of its own; if not, restart the server"
            )
        if health.run == run and version and not self.has_weights:
            raise ConfigError(
                f"{who} serves policy version {version} of this run, which has published none (it began "
                "anew); restart the server, so that it serves version 0"
            )


def other_vocabulary(who: str, model: str, remedy: str = "take one with the same tokenizer") -> str:
    return f"{who} has another vocabulary than {model}: a token id would not mean the same to both; {remedy}"


class Pulse:
    """Measures how long a server has made no progress: it has work and answers, but none of its counts moves.

    A generation may take hours: as long as tokens are sampled, prefilled or scored, the server makes
    progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: tuple[object, ...] = ()
        self._moved_at = clock()

    def still_s(self, health: Health, *, has_work: bool) -> float:
        """Returns the seconds since a count moved, or since the server was last seen without work."""
        counts = (
            health.server_id,
            health.policy_version,
            health.sampled_tokens,
            health.delivered_tokens,
            health.cancelled_tokens,
            health.prefill_tokens,
            health.scored_tokens,
            health.busy_s,
        )
        if counts != self._counts or not has_work:
            self._counts = counts
            self._moved_at = self._clock()
        return self._clock() - self._moved_at
