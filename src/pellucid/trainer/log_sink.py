"""One line per step in the trainer's log."""

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class LogSink:
    def __init__(self, run: str = "") -> None:
        """Takes `run`, which every line of a trainer that serves several runs names."""
        self._run = run and f"{run}: "

    def log(self, step: int, values: Mapping[str, float]) -> None:
        logger.info(
            "%sstep %d  loss %.4g  grad norm %.3g  %d tokens, %d with loss, %d padding in %d micro batches  "
            "%.0f tok/s",
            self._run,
            step,
            *(values[name] for name in ("loss", "grad_norm", "tokens", "loss_tokens", "padding_tokens")),
            values["micro_batches"],
            values["throughput/tokens_per_s"],
        )

    def close(self) -> None:
        """Does nothing: the log stays open."""
