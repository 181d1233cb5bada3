"""The trainer's alarms: they judge sampling, policy versions, updates and masks; see docs/alarms.md.

Each rank sums up what it trains (`Watched`). The main process judges the sum of all ranks after each step.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data import TokenTable
from pellucid.data.alarms import Alarm
from pellucid.data.rollout import NOT_OURS
from pellucid.loss import LossRecord
from pellucid.metrics.alarms import Bell, MeanZeroTest
from pellucid.model import TokenOutput
from pellucid.packing import MicroBatch
from pellucid.trainer.optimizer import Update
from pellucid.trainer.update_watch import Look

Bools = NDArray[np.bool_]

SURPRISE, VERSIONS, UPDATE, FROZEN, STOP_TOKENS = "surprise", "versions", "update", "frozen", "stop_tokens"

MOST_SURPRISE = 32.0
"""Bound in nats at which ±(H + log π)·r is clipped. For tokens drawn from π, clipping moves the mean by at
most V·32·e⁻³², which is 7e-8 for a vocabulary of 150,000."""

SURPRISE_TOLERANCE = 0.05
"""Mean in nats per token that rings no alarm. Rollouts that are not sent (failed, stale, filtered) may differ
from the rest, and in bfloat16 the engine's logprobs are not quite those that it draws from."""

STUCK_STEPS = 64
"""Steps in a row whose batches may lack a newer policy version before the alarm rings."""

LOST_LOOKS = 3
"""Looks at a tensor that has never changed, each with updates lost to rounding, before the alarm rings."""

GRADIENT_LOOKS = 8
"""Looks at a tensor that has never had a gradient before the alarm rings: 256 steps, since an expert may wait
for a token."""


class Watched(NamedTuple):
    """Sums that one rank takes over its part of a step; `sum` adds up those of all ranks."""

    num_tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of the squared surprises; `num_tokens` counts the tested tokens, `total` sums their surprises."""

    num_stops: int = 0
    num_untrained: int = 0
    """Sequences whose stop token has no loss, of `num_stops` that have one after a trainable token."""

    untrained: str = ""
    """Id of the first rollout with an untrained stop token; "" if there is none."""

    @classmethod
    def sum(cls, parts: Iterable["Watched"]) -> "Watched":
        whole = cls()
        for part in parts:
            whole = cls(
                whole.num_tokens + part.num_tokens,
                whole.total + part.total,
                whole.squares + part.squares,
                whole.num_stops + part.num_stops,
                whole.num_untrained + part.num_untrained,
                whole.untrained or part.untrained,
            )
        return whole


class StepWatch:
    """Sums up one rank's part of a step; the sums stay on the device until `watched` reads them."""

    def __init__(self, table: TokenTable) -> None:
        """Takes `table`, the batch of the step on all ranks."""
        self._tested = fair_rollouts(table)
        self._num_tested = 0
        self._sums: Tensor | None = None
        self._num_stops = self._num_untrained = 0
        self._untrained = ""

    def add(
        self, packed: MicroBatch, sampled: Bools, loss_mask: Bools, output: TokenOutput, record: LossRecord
    ) -> None:
        self._note_stops(packed, sampled, loss_mask)
        if record.ratios is None or not self._tested:
            return
        table = packed.table
        is_tested = np.array([each in self._tested for each in table["rollout_id"].tolist()])
        chosen = torch.from_numpy(np.flatnonzero(np.repeat(is_tested, table.lengths) & sampled & loss_mask))
        surprise = (output.entropy + output.logprobs.detach()) * record.ratios.importance_ratio
        surprise = surprise.clamp(-MOST_SURPRISE, MOST_SURPRISE).index_select(0, chosen.to(surprise.device))
        surprise = surprise.double()
        sums = torch.stack([surprise.sum(), surprise.dot(surprise)])
        self._num_tested += len(chosen)
        self._sums = sums if self._sums is None else self._sums + sums

    def _note_stops(self, packed: MicroBatch, sampled: Bools, loss_mask: Bools) -> None:
        """Counts replies with a stop token after a trainable token, and those whose stop token has no loss.

        Truncated sequences and replies of a single token are left out.
        """
        table, num = packed.table, len(packed.received)
        reasons = table["stop_reason"][:num].tolist()  # compared one by one: faster than in NumPy
        is_stop = np.array([reason == "stop" for reason in reasons], bool)
        is_whole = (table.lengths[:num] > 1) & (table.sampled_lengths[:num] == packed.received)
        rows = (is_whole & is_stop).nonzero()[0]
        last = table.token_offsets[rows + 1] - 1
        trains = sampled[last] & sampled[last - 1] & loss_mask[last - 1]
        untrained = rows[trains & ~loss_mask[last]]
        self._num_stops += int(trains.sum())
        self._num_untrained += len(untrained)
        if len(untrained):
            self._untrained = self._untrained or str(table["rollout_id"][untrained[0]])

    def watched(self) -> Watched:
        total, squares = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        stops = self._num_stops, self._num_untrained, self._untrained
        return Watched(self._num_tested, total, squares, *stops)


def fair_rollouts(table: TokenTable) -> set[str]:
    """Picks rollouts that are in the batch whatever they sampled, so that their tokens are a fair sample.

    The orchestrator sends no group whose rewards are all equal. So each group is split in two by a hash of
    the rollout ids. If the rewards of the first half differ, the group is sent whatever the second half
    sampled, and the second half is tested.

        rewards   0  1  1  0 | 1  1  1  1      the second half is tested
                  1  1  1  1 | 0  1  1  0      none is: the second half is why it was sent
    """
    rewards: dict[str, set[float]] = defaultdict(set)
    tested: dict[str, list[str]] = defaultdict(list)
    columns = (table[name].tolist() for name in ("group_id", "rollout_id", "reward"))
    for group, rollout, reward in zip(*columns, strict=True):
        if not rollout:
            continue
        if crc32(rollout.encode()) & 128:
            tested[group].append(rollout)
        elif math.isfinite(reward):
            rewards[group].add(reward)
    differing = (group for group, own in rewards.items() if len(own) > 1)
    return {rollout for group in differing for rollout in tested[group]}


class TrainerAlarms:
    """The alarms of one run; its main process judges them after each step."""

    def __init__(self, output_dir: Path, *, publishes: bool, lr: float, frozen: Sequence[str]) -> None:
        """Takes `lr`, the peak of the schedule, and `frozen`, parameters that require no gradient."""
        self._bell = Bell(output_dir, (SURPRISE, VERSIONS, UPDATE, FROZEN, STOP_TOKENS))
        self._surprise = MeanZeroTest(MOST_SURPRISE, SURPRISE_TOLERANCE)
        self._versions = VersionWatch(publishes=publishes)
        self._lr = lr
        self._frozen = frozen
        self._num_idle: Counter[str] = Counter()
        """Looks per tensor that found no gradient, or updates lost to rounding."""
        self._changed: set[str] = set()

    def judge(
        self, step: int, table: TokenTable, ranks: Sequence[Watched], update: Update
    ) -> dict[str, float]:
        """Rings the alarms that a step gives cause for, and returns the metrics of all alarms."""
        watched = Watched.sum(ranks)
        if not update.is_skipped:
            self._judge_surprise(step, watched)
        self._judge_stops(step, watched)
        if self._frozen:
            self._ring_frozen(step, self._frozen[0], "does not require a gradient")
        for look in update.looks:
            self._judge_update(step, look, update.lr)
        if (found := self._versions.fault(step, table)) is not None:
            self._bell.ring(found)
        return self._bell.metrics()

    def _judge_surprise(self, step: int, watched: Watched) -> None:
        test = self._surprise
        test.add(watched.num_tokens, watched.total, watched.squares)
        if not test.rings:
            return
        side = "likelier" if test.mean > 0 else "less likely"
        self._bell.ring(
            test.alarm(
                SURPRISE,
                step,
                f"sampled tokens are {side} than draws from the policy: entropy + log π, in nats",
                example=f"{int(test.count):,} tokens",
                causes="The engine does not draw from the distribution whose logprobs it reports (top-k, "
                "top-p, min-p, a penalty, another temperature, random numbers that repeat), or rollouts are "
                "left out by what they sampled (a filter, failures, timeouts). Run `pellucid verify`",
            )
        )

    def _judge_stops(self, step: int, watched: Watched) -> None:
        if watched.num_untrained:
            self._bell.ring(
                Alarm(
                    name=STOP_TOKENS,
                    step=step,
                    statistic="share of rollouts that end with a stop token and train on it",
                    value=1 - watched.num_untrained / watched.num_stops,
                    threshold=1.0,
                    example=f"rollout {watched.untrained!r}",
                    causes="The loss mask leaves out the token that ends a reply: the policy never learns to "
                    "stop. Look at who makes the mask",
                )
            )

    def _judge_update(self, step: int, look: Look, lr: float) -> None:
        if look.num_changed:
            self._changed.add(look.name)
        if look.num_due and not look.num_changed:
            self._ring_frozen(step, look.name, "has a gradient, and AdamW would have moved it")
        elif look.excess > 1:
            what = "first moments" if look.is_moment else "weights"
            self._bell.ring(
                Alarm(
                    name=UPDATE,
                    step=step,
                    statistic=f"difference of {what} from those of AdamW, ÷ what rounding explains",
                    value=look.excess,
                    threshold=1.0,
                    example=f"{look.name}: {what} are {look.factor:.3g} × as large as AdamW makes them"
                    if look.is_moment
                    else f"{look.name} moved {look.factor:.3g} × as far as AdamW moves it",
                    causes=_UPDATE_CAUSES,
                )
            )
        is_idle = look.is_lost or not look.has_gradient
        # During warm-up and at the end of a schedule, updates may be too small for the dtype.
        if is_idle and look.name not in self._changed and lr >= self._lr / 2:
            self._num_idle[look.name] += 1
            if look.is_lost and self._num_idle[look.name] >= LOST_LOOKS:
                self._ring_frozen(
                    step, look.name, f"has a gradient, but updates of lr = {lr:g} round to nothing"
                )
            if not look.has_gradient and self._num_idle[look.name] >= GRADIENT_LOOKS:
                self._ring_frozen(step, look.name, "has never had a gradient")

    def _ring_frozen(self, step: int, name: str, why: str) -> None:
        self._bell.ring(
            Alarm(
                name=FROZEN,
                step=step,
                statistic="share of the elements of a tensor that a step changed",
                value=0.0,
                threshold=0.0,
                example=f"{name} {why}",
                causes="A tensor that should train stays as it is: it is frozen, it is a copy of the one "
                "that the forward uses (a tied head), or its dtype is too coarse for the learning rate",
            )
        )


_UPDATE_CAUSES = (
    "The optimizer does something else than trainer.optim says: another learning rate, no clipping, two "
    "steps for one, state that was not restored, or somebody else writes to the weights"
)


@dataclass
class VersionWatch:
    """Compares the policy versions of each batch's tokens with those that the trainer has published."""

    publishes: bool
    newest: int = -1
    since: int = 0
    """Step whose batch was the first with a token of the newest version."""

    def fault(self, step: int, table: TokenTable) -> Alarm | None:
        versions = table["policy_versions"]
        if not versions.size:
            return None
        newest = int(versions.max())
        if newest > self.newest:
            self.newest, self.since = newest, step
        if newest > step:
            return _versions(
                step,
                f"newest policy version in the batch of step {step}, for which {step} is the newest there is",
                newest,
                step,
                _owner(table, int(versions.argmax())),
            )
        falls = _falls(table, versions) if versions.min() < newest else np.zeros(0, np.int64)
        if len(falls):
            at = int(falls[0])
            fall = f"{_owner(table, at)}: {versions[at - 1]}, then {versions[at]}"
            return _versions(
                step, "tokens of an older policy version than the one before", len(falls), 0, fall
            )
        if self.publishes and newest != NOT_OURS and step - self.since >= STUCK_STEPS:
            what = f"steps since a newer policy version than {self.newest} was sampled from"
            return _versions(step, what, step - self.since, STUCK_STEPS, f"batch of step {step}")
        return None


def _falls(table: TokenTable, versions: NDArray[Any]) -> NDArray[np.int64]:
    """Finds sampled tokens of an older version than the one before in their sequence."""
    rises = np.diff(versions.astype(np.int64), prepend=int(versions[0]))
    starts = table.sampled_offsets[:-1]
    rises[starts[starts < len(rises)]] = 0  # another sequence
    return np.flatnonzero(rises < 0)


def _versions(step: int, statistic: str, value: float, threshold: float, example: str) -> Alarm:
    return Alarm(
        name=VERSIONS,
        step=step,
        statistic=statistic,
        value=value,
        threshold=threshold,
        example=example,
        causes="The versions that tokens name are not those that sampled them, so that staleness is counted "
        "wrong, or the engine does not load what is published. Look at the engine's `update_weights`, and at "
        "the version that it writes to each token",
    )


def _owner(table: TokenTable, token: int) -> str:
    row = int(np.searchsorted(table.sampled_offsets, token, side="right")) - 1
    return f"rollout {str(table['rollout_id'][row])!r}"
