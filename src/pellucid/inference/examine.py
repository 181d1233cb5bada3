"""Whether a server is the one that a run may use. Pure.

what differs             policy                                      teacher
vocabulary               refused                                     refused
max_model_len            refused if it is less than the run's        the same
the model that it loaded refused, where both sides can tell          anything goes
the weights that it has  those it loaded, or this run's; any         anything goes
                         other run's are refused
"""

from dataclasses import dataclass

from pellucid.errors import ConfigError
from pellucid.inference.protocol import Health


@dataclass(frozen=True, slots=True)
class Expected:
    """What the servers of a run are held to, at the start, at every update and whenever one comes back."""

    role: str
    """`policy server` or `teacher`, for messages."""

    model: str
    """`model.name` of the run."""

    vocabulary: str
    """Fingerprint of the tokenizer that the run uses."""

    max_model_len: int
    run: str | None = None
    """Identity of the run; None for a teacher, which serves whatever it likes."""

    model_fingerprint: str = ""
    """Of the model at `model`; "" where this machine does not have its weights."""

    has_weights: bool = False
    """Whether the run has published weights, so that a server with any of its versions can be given them."""

    def check(self, url: str, health: Health) -> None:
        """Raises ConfigError with both values and the remedy if the server at `url` is not the run's."""
        who = f"the {self.role} {health.model!r} at {url}"
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
