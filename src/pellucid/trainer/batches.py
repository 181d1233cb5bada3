"""Sources of the trainer's batches: an orchestrator, a data set, or random tokens."""

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
        """Blocks until the samples of `step` arrive, and returns them."""

    def release_before(self, step: int) -> None:
        """Lets batches of earlier steps be deleted: a checkpoint covers them."""


def share_table(ranks: Ranks, make: Callable[[], TokenTable]) -> TokenTable:
    """Calls `make` in the main process alone, and returns its table in every process."""
    if ranks.group is None:
        return make()
    made: list[TokenTable] = []

    def encoded() -> bytes:
        made.append(make())
        return encode_batch(Batch("", 0, made[0]))

    payload = ranks.share(encoded)
    return made[0] if made else from_main(payload)


def from_main(payload: bytes) -> TokenTable:
    """Decodes a table of the main process, without size limits: the main process has checked its samples."""
    return decode_batch(payload, sender="the main process", limits=UNLIMITED).table


def open_batches(config: TrainerRunConfig) -> BatchReceiver:
    """Opens the receiver of a run's batches; it refuses samples that the model of the run cannot train on."""
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
    """Source of a process that receives nothing itself: the main process sends it every batch."""

    def next(self, step: int) -> TokenTable:
        raise AssertionError(f"the batch of step {step} is received by the main process")

    def release_before(self, step: int) -> None:
        """Does nothing: only the main process holds batches."""


class DatasetBatches:
    """Batches of a data set that is shuffled anew each epoch; a batch depends on seed and step alone."""

    def __init__(self, samples: Sequence[TrainingSample], batch_size: int, seed: int) -> None:
        self._samples = samples
        self._order = ShuffledBatches(len(samples), batch_size, seed)

    def next(self, step: int) -> TokenTable:
        return TokenTable.from_samples([self._samples[index] for index in self._order.batch(step)])

    def release_before(self, step: int) -> None:
        """Does nothing: the samples stay in memory."""


class FakeBatches:
    """Samples of random tokens, of full length, half of it prompt. A batch depends on seed and step alone."""

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
        """Does nothing: batches are made when they are asked for."""
