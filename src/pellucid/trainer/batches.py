"""Where the trainer's batches come from: an orchestrator, a data set, or nowhere."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pellucid.config import TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.model.load import experts_of, vocab_size
from pellucid.trainer.ranks import Ranks
from pellucid.trainer.sft_data import ShuffledBatches
from pellucid.transport import UNLIMITED, Batch, BatchReceiver, decode_batch, encode_batch, open_receiver


class BatchSource(Protocol):
    def next(self, step: int) -> TokenTable:
        """Blocks until the samples of this step are there."""

    def release_before(self, step: int) -> None:
        """Earlier steps are trained and saved; their batches are no longer needed."""


def share_table(ranks: Ranks, make: Callable[[], TokenTable]) -> TokenTable:
    """A table that the main process makes, in every process: the others get its bytes."""
    if ranks.group is None:
        return make()
    made: list[TokenTable] = []

    def encoded() -> bytes:
        made.append(make())
        return encode_batch(Batch("", 0, made[0]))

    payload = ranks.share(encoded)
    return made[0] if made else from_main(payload)


def from_main(payload: bytes) -> TokenTable:
    """What the main process made of samples that it has judged, whatever limits their sender had to keep."""
    return decode_batch(payload, sender="the main process", limits=UNLIMITED).table


def open_batches(config: TrainerRunConfig) -> BatchReceiver:
    """Refuses what the model of the run cannot train on before it counts as delivered."""
    return open_receiver(
        config.transport,
        config.output_dir,
        config.run_name,
        vocab_size=vocab_size(config.model),
        experts=experts_of(config.model) if config.trainer.enable_router_replay else None,
    )


class OrchestratorBatches:
    def __init__(self, receiver: BatchReceiver) -> None:
        self._receiver = receiver

    def next(self, step: int) -> TokenTable:
        return self._receiver.receive(step).table

    def release_before(self, step: int) -> None:
        self._receiver.release_before(step)


class NoBatches:
    """Of a process that gets what the main one received."""

    def next(self, step: int) -> TokenTable:
        raise AssertionError(f"the batch of step {step} is received by the main process")

    def release_before(self, step: int) -> None:
        """The main process holds them."""


class DatasetBatches:
    """A data set, shuffled, epoch after epoch; a batch depends on seed and step alone."""

    def __init__(self, samples: Sequence[TrainingSample], batch_size: int, seed: int) -> None:
        self._samples = samples
        self._order = ShuffledBatches(len(samples), batch_size, seed)

    def next(self, step: int) -> TokenTable:
        return TokenTable.from_samples([self._samples[index] for index in self._order.batch(step)])

    def release_before(self, step: int) -> None:
        """A data set stays where it is."""


class FakeBatches:
    """Random tokens; samples of full length, half of it prompt. A batch depends on seed and step alone."""

    def __init__(self, batch_size: int, *, length: int, vocab_size: int, run_id: str, seed: int) -> None:
        self._batch_size = batch_size
        self._length = length
        self._vocab_size = vocab_size
        self._run_id = run_id
        self._seed = seed

    def next(self, step: int) -> TokenTable:
        generator = np.random.default_rng([self._seed, step])
        return TokenTable.from_samples([self._sample(generator, index) for index in range(self._batch_size)])

    def _sample(self, generator: np.random.Generator, index: int) -> TrainingSample:
        token_ids = generator.integers(0, self._vocab_size, self._length)
        num_prompt = self._length // 2
        return TrainingSample.from_turn(
            token_ids[:num_prompt],
            token_ids[num_prompt:],
            np.full(self._length - num_prompt, -np.log(self._vocab_size)),
            env_name="fake",
            run_id=self._run_id,
            advantage=1.0 if index % 2 else -1.0,
        )

    def release_before(self, step: int) -> None:
        """Nothing is kept."""
