"""Samples as rl runs make them, drawn from a seed: what transport and packing are measured on.

Groups of 8 with a common prompt, from 4 environments. Prompts and completions are log-normal in length, at
most 30,000 tokens together. Token ids are Zipf-distributed and loosely follow frequency, as those of BPE: the
k-th most frequent token has the id that k · e^N(0,1) gets when sorted. 40% of the samples have spans that the
environment masked out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pellucid.data import TrainingSample

NUM_SAMPLES = 1024
GROUP_SIZE = 8
NUM_ENVS = 4
MAX_LENGTH = 30_000
VOCAB_SIZE = 151_936


def long_sample() -> TrainingSample:
    """15,000 + 15,000 tokens at one temperature."""
    return TrainingSample.from_turn(
        100_000 + np.arange(15_000),
        120_000 + np.arange(15_000),
        -0.1 - np.arange(15_000) * 1e-6,
        env_name="synthetic-env",
        group_id="g",
        advantage=1.0,
        reward=1.0,
        temperature=1.0,
    )


@dataclass(frozen=True, slots=True)
class Shapes:
    """Tokens of each sample: its group's prompt, and its own completion."""

    prompts: NDArray[np.int64]
    completions: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.prompts + self.completions


def draw_shapes(num_samples: int = NUM_SAMPLES, seed: int = 0, scale: float = 1.0) -> Shapes:
    """`scale` multiplies the median lengths."""
    generator = np.random.default_rng(seed)
    num_groups = -(-num_samples // GROUP_SIZE)
    drawn = _log_normal(generator, 600 * scale, 0.8, num_groups)
    prompts = np.repeat(np.minimum(drawn, MAX_LENGTH - 1), GROUP_SIZE)[:num_samples]
    completions = _log_normal(generator, 2500 * scale, 1.0, num_samples)
    return Shapes(prompts, np.minimum(completions, MAX_LENGTH - prompts))


def draw_samples(num_samples: int = NUM_SAMPLES, seed: int = 0, scale: float = 1.0) -> list[TrainingSample]:
    shapes = draw_shapes(num_samples, seed, scale)
    generator = np.random.default_rng([seed, 1])
    ids = _TokenIds(generator)
    samples: list[TrainingSample] = []
    prompt = np.zeros(0, np.uint32)
    for index, (num_prompt, num_completion) in enumerate(
        zip(shapes.prompts.tolist(), shapes.completions.tolist(), strict=True)
    ):
        group, member = divmod(index, GROUP_SIZE)
        if member == 0:
            prompt = ids.draw(num_prompt)
        reward = float(generator.integers(0, 2))
        samples.append(
            TrainingSample.from_turn(
                prompt,
                ids.draw(num_completion),
                -generator.exponential(0.4, num_completion).astype(np.float32),
                completion_mask=_trainable(generator, num_completion),
                env_name=f"env-{group % NUM_ENVS}",
                example_id=f"{group}",
                group_id=f"g{group}",
                rollout_id=f"g{group}-r{member}",
                sample_id=f"g{group}-r{member}-0",
                run_id="bench",
                reward=reward,
                advantage=reward - 0.5,
            )
        )
    return samples


class _TokenIds:
    """Zipf with exponent 1.05 over the vocabulary."""

    def __init__(self, generator: np.random.Generator) -> None:
        ranks = np.arange(1, VOCAB_SIZE + 1)
        weights = ranks**-1.05
        self._generator = generator
        self._cumulative = np.cumsum(weights / weights.sum())
        order = np.argsort(ranks * np.exp(generator.normal(size=VOCAB_SIZE)))
        self._id_of_rank = np.empty(VOCAB_SIZE, np.uint32)
        self._id_of_rank[order] = np.arange(VOCAB_SIZE)

    def draw(self, num: int) -> NDArray[np.uint32]:
        ranks = np.searchsorted(self._cumulative, self._generator.random(num))
        return self._id_of_rank[np.minimum(ranks, VOCAB_SIZE - 1)]


def _trainable(generator: np.random.Generator, num_tokens: int) -> NDArray[np.bool_]:
    """Of two samples in five, 1 to 4 spans of 50 to 500 tokens are not."""
    mask = np.ones(num_tokens, np.bool_)
    if generator.random() < 0.4:
        for _ in range(generator.integers(1, 5)):
            start = generator.integers(0, num_tokens)
            mask[start : start + generator.integers(50, 501)] = False
    return mask


def _log_normal(generator: np.random.Generator, median: float, sigma: float, size: int) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(median * np.exp(sigma * generator.normal(size=size)))).astype(np.int64)
