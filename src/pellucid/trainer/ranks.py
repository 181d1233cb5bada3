"""The processes that train one model together, as the rest of the trainer sees them.

    process     0  1  2  3  4  5  6  7      of 8, with dp_replicate = 2 and cp = 2
    rank        0  0  1  1  2  2  3  3      trains micro batches of its own, and keeps books of its own
    cp rank     0  1  0  1  0  1  0  1      has a slice of the tokens of each
    replica     0  0  0  0  1  1  1  1      has the whole model, sharded over its processes

Only the main process receives batches, reports metrics, and writes weights and checkpoints' books; of each
rank, only the first cp rank exports tokens and writes a journal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pellucid.config import TrainerPrecision
    from pellucid.model import ContextParallel, Policy

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A trainer of one process; `pellucid.trainer.parallel.Processes` stands for several.

    Every process calls the same methods in the same order.
    """

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def keeps_books(self) -> bool:
        """Whether this process writes the journal and the export of its rank: the first cp rank does."""
        return True

    @property
    def num_processes(self) -> int:
        """Processes of the trainer on all machines."""
        return 1

    @property
    def num_local(self) -> int:
        """Processes on this machine."""
        return 1

    @property
    def computes_in(self) -> "TrainerPrecision":
        """The dtype of weights and activations in a forward; gradients are summed in float32."""
        return "float32"

    @property
    def group(self) -> "ProcessGroup | None":
        """Group of all processes, for control messages; None if this process is alone."""
        return None

    @property
    def context(self) -> "ContextParallel | None":
        """Context-parallel ranks that share this rank's micro batches; None without context parallelism."""
        return None

    def apart(self) -> "Ranks":
        """Returns the same processes with a process group of its own, for use by another thread."""
        return self

    def gather(self, value: Any) -> list[Any]:
        """Gathers one value per rank, in order of ranks, in every process."""
        return [value]

    def gather_all(self, value: Any) -> list[Any]:
        """Gathers one value per process, in order, in every process."""
        return [value]

    def share(self, make: Callable[[], T]) -> T:
        """Calls `make` in the main process alone; every process returns its result, or raises its error."""
        return make()

    def alike(self, make: Callable[[], T]) -> T:
        """Calls `make` in every process, and raises in every process if it fails in one.

        `make` must not talk to the other processes: one that fails would leave them waiting.
        """
        value, own_error = outcome_of(make)
        errors = [error for error in self.gather_all(own_error) if error is not None]
        if errors:
            raise own_error or errors[0]  # its own has a cause and a traceback, which are not sent
        return cast(T, value)

    def shard(self, policy: "Policy") -> None:
        """Shards the model over the processes; this one keeps its shard."""


def outcome_of(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Returns what `make` returned and raised; catches everything, so that all processes end alike."""
    try:
        return make(), None
    except BaseException as error:
        return None, error
