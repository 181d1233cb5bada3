"""The trainer's alarms: they judge sampling, policy versions, updates and masks; see docs/alarms.md.

StepWatch      sums over the tokens that a rank trains
VersionWatch   policy versions of the whole batch
UpdateWatch    a few weights before and after a step, against AdamW's formula
TrainerAlarms  on the main rank: judges all of these after each step, and rings
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.config import OptimConfig
from pellucid.data import TokenTable
from pellucid.data.alarms import Bell
from pellucid.data.rollout import NOT_OURS
from pellucid.data.rows import RunRows
from pellucid.data.tensors import read_together, to_device
from pellucid.loss import LossRecord
from pellucid.metrics import MeanZeroTest
from pellucid.model import TokenOutput
from pellucid.packing import MicroBatch

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

SURPRISE, VERSIONS, UPDATE, FROZEN, STOP_TOKENS = "surprise", "versions", "update", "frozen", "stop_tokens"

CAUSES = {
    SURPRISE: "The engine does not draw from the distribution whose logprobs it reports (top-k, top-p, "
    "min-p, a penalty, another temperature, random numbers that repeat), or rollouts are left out by what "
    "they sampled (a filter, failures, timeouts). Run `pellucid verify`",
    VERSIONS: "The versions that tokens name are not those that sampled them, so that staleness is counted "
    "wrong, or the engine does not load what is published. Look at the engine's `update_weights`, and at the "
    "version that it writes to each token",
    UPDATE: "The optimizer does something else than trainer.optim says: another learning rate, no clipping, "
    "two steps for one, state that was not restored, or somebody else writes to the weights",
    FROZEN: "A tensor that should train stays as it is: it is frozen, it is a copy of the one that the "
    "forward uses (a tied head), or its dtype is too coarse for the learning rate",
    STOP_TOKENS: "The loss mask leaves out the token that ends a reply: the policy never learns to stop. "
    "Look at who makes the mask",
}

ALL_UNTIL_STEP, WATCH_EVERY = 32, 4
"""Steps whose tokens are watched: all of the first 32, every fourth of the others. The choice does not depend
on what was sampled, so the tests stay valid; a fault that comes later is found after four times as many
steps."""

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

LOOK_EVERY = 8
"""Steps from one look to the next."""

NUM_TURNS = 4
"""Looks in which every tensor has its turn once."""

NUM_ELEMENTS = 32
"""Elements of each tensor that a look compares."""

UPDATE_TOLERANCE = 1e-3
"""Relative error that an update may have. In float32, 1 − β₂ for β₂ = 0.999 has a relative error of 6e-5."""

_NUM_ROUNDINGS = 8
"""Rounding errors that a step may add to a weight, each of float32 eps × its size."""

_EPS, _TINY = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)


class AlarmSums(NamedTuple):
    """Sums that one rank takes over its part of a step."""

    num_tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of the squared surprises; `num_tokens` counts the tested tokens, `total` sums their surprises."""

    num_stops: int = 0
    num_untrained: int = 0
    """Sequences whose stop token has no loss, of `num_stops` that have one after a trainable token."""

    untrained: str = ""
    """Id of the first rollout with an untrained stop token; "" if there is none."""


class StepWatch:
    """Sums up one rank's part of a step; the sums stay on the device until they are read."""

    def __init__(self, table: TokenTable, step: int) -> None:
        """Takes `table`, the batch of the step on all ranks."""
        self._is_watched = step < ALL_UNTIL_STEP or step % WATCH_EVERY == 0
        self._tested = fair_rollouts(table) if self._is_watched else set()
        self._num_tested = 0
        self._surprise: Tensor | None = None
        self._totals = (0.0, 0.0)
        self._num_stops = self._num_untrained = 0
        self._untrained = ""

    def add(
        self, packed: MicroBatch, sampled: Bools, loss_mask: Bools, output: TokenOutput, record: LossRecord
    ) -> None:
        if not self._is_watched:
            return
        self._add_stops(packed, sampled, loss_mask)
        if record.ratios is None or not self._tested:
            return
        table = packed.table
        is_tested = np.array([each in self._tested for each in table["rollout_id"].tolist()])
        tokens = np.flatnonzero(np.repeat(is_tested, table.lengths) & sampled & loss_mask)
        (chosen,) = to_device([tokens], output.entropy.device)
        columns = output.entropy, output.logprobs.detach(), record.ratios.importance_ratio
        entropy, logprobs, ratio = (column.index_select(0, chosen) for column in columns)
        surprise = ((entropy + logprobs) * ratio).clamp(-MOST_SURPRISE, MOST_SURPRISE).double()
        sums = torch.stack([surprise.sum(), surprise.dot(surprise)])
        self._num_tested += len(tokens)
        self._surprise = sums if self._surprise is None else self._surprise + sums

    def _add_stops(self, packed: MicroBatch, sampled: Bools, loss_mask: Bools) -> None:
        """Counts replies with a stop token after a trainable token, and those whose stop token has no loss.

        Truncated sequences and replies of a single token are left out.
        """
        table, num = packed.table, len(packed.received)
        reasons = table["stop_reason"].tolist()[:num]  # compared one by one: faster than in NumPy
        is_stop = np.array([reason == "stop" for reason in reasons], bool)
        last = table.token_offsets[1 : num + 1] - 1
        is_whole = (table.lengths[:num] > 1) & (table.sampled_lengths[:num] == packed.received)
        trains = is_stop & is_whole & sampled[last] & sampled[last - 1] & loss_mask[last - 1]
        untrained = np.flatnonzero(trains & ~loss_mask[last])
        self._num_stops += int(np.count_nonzero(trains))
        if len(untrained):
            self._num_untrained += len(untrained)
            self._untrained = self._untrained or str(table["rollout_id"][untrained[0]])

    def tensors(self) -> list[Tensor]:
        """Returns what `take` wants in host memory."""
        return [] if self._surprise is None else [self._surprise]

    def take(self, arrays: Sequence[Floats]) -> None:
        for total, squares in arrays:
            self._totals = float(total), float(squares)

    def sums(self) -> AlarmSums:
        """Returns the sums; those on the device are 0 until they are read."""
        return AlarmSums(
            self._num_tested, *self._totals, self._num_stops, self._num_untrained, self._untrained
        )


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
    differing = (group for group, distinct in rewards.items() if len(distinct) > 1)
    return {rollout for group in differing for rollout in tested[group]}


class Fault(NamedTuple):
    """A finding that rings an alarm."""

    statistic: str
    value: float
    threshold: float
    example: str


@dataclass
class VersionWatch:
    """Compares the policy versions of each batch's tokens with those that the trainer has published."""

    publishes: bool
    newest: int = -1
    since: int = 0
    """Step whose batch was the first with a token of the newest version."""

    def fault(self, step: int, table: TokenTable) -> Fault | None:
        rows = table.columns["policy_versions"]
        if isinstance(rows, RunRows):  # one entry per run of tokens of equal version
            versions, starts = rows.runs[:, 0], rows.run_offsets
        else:
            versions, starts = rows.array, table.sampled_offsets
        if not versions.size:
            return None
        newest = int(versions.max())
        if newest > self.newest:
            self.newest, self.since = newest, step

        def owner(index: int) -> str:
            row = int(np.searchsorted(starts, index, side="right")) - 1
            return f"rollout {str(table['rollout_id'][row])!r}"

        if newest > step:
            what = (
                f"newest policy version in the batch of step {step}, for which {step} is the newest there is"
            )
            return Fault(what, newest, step, owner(int(versions.argmax())))
        is_older = np.zeros(len(versions) + 1, np.bool_)
        is_older[1:-1] = versions[1:] < versions[:-1]
        is_older[starts] = False  # the version before is of another sequence
        if is_older.any():
            at = int(is_older.argmax())
            fall = f"{owner(at)}: {versions[at - 1]}, then {versions[at]}"
            num_falls = int(np.count_nonzero(is_older))
            return Fault("tokens of an older policy version than the one before", num_falls, 0, fall)
        if self.publishes and newest != NOT_OURS and step - self.since >= STUCK_STEPS:
            what = f"steps since a newer policy version than {self.newest} was sampled from"
            return Fault(what, step - self.since, STUCK_STEPS, f"batch of step {step}")
        return None


class Look(NamedTuple):
    """Comparison of one tensor's update in one step with AdamW's formula."""

    name: str
    has_gradient: bool = True
    has_changed: bool = False
    """Whether an element changed whose update by AdamW exceeds its rounding error."""

    is_stuck: bool = False
    """Whether there are such elements, and none changed."""

    is_lost: bool = False
    """Whether no element changed because every update of AdamW is lost to rounding."""

    excess: float = 0.0
    """Largest difference from AdamW's weight or moment ÷ the rounding error allowed; sound below 1."""

    is_moment: bool = False
    """Whether the largest difference is that of a first moment."""

    factor: float = 1.0
    """Median of the update of a weight ÷ AdamW's update, or of a moment ÷ AdamW's moment; 1 if sound."""


class _Spots(NamedTuple):
    """Elements of one tensor: `num` of them from `start` on, `stride` apart."""

    name: str
    parameter: nn.Parameter
    num: int
    stride: int
    start: int

    def view(self, tensor: Tensor) -> Tensor:
        local = local_shard(tensor).contiguous()
        return local.as_strided((self.num,), (self.stride,), local.storage_offset() + self.start)


class Noted(NamedTuple):
    """Elements of some tensors before a step, on the device."""

    places: Sequence[_Spots]
    values: Sequence[Tensor]
    """Weights, unclipped gradients, first and second moments; and how often AdamW has updated each tensor."""

    bare: Sequence[str]
    """Tensors without a gradient."""


class UpdateWatch:
    """Compares the update of a few weights with AdamW's formula, every few steps.

    Before the gradients are clipped, `before` copies a few elements of some tensors: weight, gradient,
    moments. After the step, `after` reads them, and compares weights and first moments of the same elements
    with AdamW's formula, in float64, for the gradient clipped at `max_norm` and the learning rate of the
    schedule:

        g ← g · min(1, max_norm / norm)        m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
        w ← w · (1 − lr·wd) − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    The first moments are compared, too: AdamW divides a gradient by its own size, so that one that is not
    clipped hardly shows in the weights. Every tensor has its turn once in 32 steps, each time with other
    elements.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], adamw: torch.optim.AdamW, optim: OptimConfig
    ) -> None:
        self._parameters = list(parameters.items())
        self._adamw = adamw
        self._optim = optim
        self._num_steps = 0
        self._random = random.Random(0)

    def before(self) -> Noted | None:
        """Copies elements of the tensors whose turn it is, with unclipped gradients; None in most steps."""
        turn, rest = divmod(self._num_steps, LOOK_EVERY)
        self._num_steps += 1
        if rest:
            return None
        places: list[_Spots] = []
        rows: tuple[list[Tensor], ...] = [], [], [], [], []
        bare: list[str] = []
        for name, parameter in self._parameters[turn % NUM_TURNS :: NUM_TURNS]:
            weight = local_shard(parameter.detach())
            if parameter.grad is None:
                bare.append(name)
            elif (size := weight.numel()) and weight.is_contiguous():
                num, stride = min(size, NUM_ELEMENTS), max(1, size // NUM_ELEMENTS)
                place = _Spots(name, parameter, num, stride, self._random.randrange(stride))
                places.append(place)
                gradient, nothing = place.view(parameter.grad), weight.new_zeros(place.num)
                first, second, number = nothing, nothing, nothing[:1]
                if state := self._adamw.state.get(parameter):
                    first, second = place.view(state["exp_avg"]), place.view(state["exp_avg_sq"])
                    number = state["step"].view(1)
                taken = place.view(weight), gradient, first, second, number
                for row, each in zip(rows, taken, strict=True):
                    row.append(each)
        return Noted(places, [torch.cat(row) for row in rows] if places else [], bare)

    def after(self, noted: Noted | None, grad_norm: float, lr: float) -> list[Look]:
        """Compares the same elements after a step; `grad_norm` is before clipping, `lr` is the step's."""
        if noted is None:
            return []
        looks = [Look(name, has_gradient=False) for name in noted.bare]
        if not noted.places:
            return looks
        optim, sizes = self._optim, [place.num for place in noted.places]
        beta, second = optim.betas
        weight, gradient, mean, square, num_before, found_weight, found_mean = read_together(
            [each.double() for each in (*noted.values, *self._found(noted))]
        )
        num_updates = num_before + 1
        gradient = gradient * min(1.0, optim.max_norm / (grad_norm + 1e-6))
        size = beta * np.abs(mean) + (1 - beta) * np.abs(gradient)
        mean = beta * mean + (1 - beta) * gradient
        square = second * square + (1 - second) * gradient * gradient
        first_scale = np.repeat(lr / (1 - beta**num_updates), sizes)
        second_scale = np.repeat(1 / (1 - second**num_updates), sizes)
        scale = first_scale / (np.sqrt(square * second_scale) + self._adamw.defaults["eps"])
        moved = -lr * optim.weight_decay * weight - scale * mean
        rounding = _EPS * np.abs(weight)
        found_moved = found_weight - weight
        by_weight = np.abs(found_moved - moved)
        by_weight /= _NUM_ROUNDINGS * rounding + UPDATE_TOLERANCE * scale * size + _TINY
        by_mean = np.abs(found_mean - mean) / (UPDATE_TOLERANCE * size + _TINY)
        is_due = np.abs(moved) > 2 * rounding + _TINY
        starts = np.cumsum([0, *sizes])
        worst = np.maximum.reduceat(np.maximum(by_weight, by_mean), starts[:-1]).tolist()
        changed = np.logical_or.reduceat(is_due & (found_moved != 0), starts[:-1]).tolist()
        for index, place in enumerate(noted.places):
            look = Look(place.name, has_changed=changed[index], excess=worst[index])
            if look.excess > 1 or not look.has_changed:
                part = slice(starts[index], starts[index + 1])
                is_moment = by_mean[part].max() > max(1.0, by_weight[part].max())
                found, expected = (found_mean, mean) if is_moment else (found_moved, moved)
                has_due = bool(is_due[part].any())
                look = look._replace(
                    is_stuck=has_due and not look.has_changed,
                    is_lost=not has_due and bool(moved[part].any()) and not found_moved[part].any(),
                    is_moment=bool(is_moment),
                    factor=_factor(found[part], expected[part]),
                )
            looks.append(look)
        return looks

    def _found(self, noted: Noted) -> list[Tensor]:
        """Copies the weights and first moments of the noted elements."""
        weights = [place.view(place.parameter.detach()) for place in noted.places]
        means = [
            place.view(state["exp_avg"])
            if (state := self._adamw.state.get(place.parameter))
            else weight.new_zeros(place.num)
            for place, weight in zip(noted.places, weights, strict=True)
        ]
        return [torch.cat(weights), torch.cat(means)]


def _factor(found: Floats, expected: Floats) -> float:
    """Returns the median ratio over the larger half of the expected values: rounding blurs the others."""
    large = np.abs(expected) >= max(np.median(np.abs(expected)), _TINY)
    return float(np.median(found[large] / expected[large])) if large.any() else math.nan


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TrainerAlarms:
    """The alarms of one run; its main process judges them after each step."""

    def __init__(self, output_dir: Path, *, publishes: bool, lr: float, frozen: Sequence[str]) -> None:
        """Takes `lr`, the peak of the schedule, and `frozen`, parameters that require no gradient."""
        self._bell = Bell(output_dir, CAUSES)
        self._surprise = MeanZeroTest(MOST_SURPRISE, SURPRISE_TOLERANCE)
        self._versions = VersionWatch(publishes=publishes)
        self._lr, self._frozen = lr, frozen
        self._num_idle: Counter[str] = Counter()
        """Looks per tensor that found no gradient, or updates lost to rounding."""
        self._changed: set[str] = set()

    def judge(
        self,
        step: int,
        table: TokenTable,
        ranks: Sequence[AlarmSums],
        looks: Sequence[Look] = (),
        *,
        lr: float,
        is_skipped: bool = False,
    ) -> dict[str, float]:
        """Rings the alarms that a step gives cause for, and returns the metrics of all alarms."""
        if (num_tokens := sum(each.num_tokens for each in ranks)) and not is_skipped:
            total, squares = sum(each.total for each in ranks), sum(each.squares for each in ranks)
            self._surprise.add(num_tokens, total, squares)
            self._ring_surprise(step)
        if num_untrained := sum(each.num_untrained for each in ranks):
            self._bell.ring(
                STOP_TOKENS,
                step,
                "share of rollouts that end with a stop token and train on it",
                value=1 - num_untrained / sum(each.num_stops for each in ranks),
                threshold=1.0,
                example=f"rollout {next(each.untrained for each in ranks if each.untrained)!r}",
            )
        if self._frozen:
            self._ring_frozen(step, self._frozen[0], "does not require a gradient")
        for look in looks:
            self._judge_update(step, look, lr)
        if (fault := self._versions.fault(step, table)) is not None:
            self._bell.ring(VERSIONS, step, *fault)
        return self._bell.metrics()

    def _ring_surprise(self, step: int) -> None:
        test = self._surprise
        if test.rings:
            side = "likelier" if test.mean > 0 else "less likely"
            self._bell.ring(
                SURPRISE,
                step,
                f"sampled tokens are {side} than draws from the policy: entropy + log π, in nats",
                test.mean,
                test.threshold,
                example=f"{test.count:,} tokens",
                p_value=test.p_value,
            )

    def _judge_update(self, step: int, look: Look, lr: float) -> None:
        name = look.name
        if look.has_changed:
            self._changed.add(name)
        if look.is_stuck:
            self._ring_frozen(step, name, "has a gradient, and AdamW would have moved it")
        elif look.excess > 1:
            what = "first moments" if look.is_moment else "weights"
            self._bell.ring(
                UPDATE,
                step,
                f"difference of {what} from those of AdamW, ÷ what rounding explains",
                look.excess,
                threshold=1.0,
                example=f"{name}: {what} are {look.factor:.3g} × as large as AdamW makes them"
                if look.is_moment
                else f"{name} moved {look.factor:.3g} × as far as AdamW moves it",
            )
        is_idle = look.is_lost or not look.has_gradient
        # During warm-up and at the end of a schedule, updates may be too small for the dtype.
        if is_idle and name not in self._changed and lr >= self._lr / 2:
            self._num_idle[name] += 1
            if look.is_lost and self._num_idle[name] >= LOST_LOOKS:
                self._ring_frozen(step, name, f"has a gradient, but updates of lr = {lr:g} round to nothing")
            if not look.has_gradient and self._num_idle[name] >= GRADIENT_LOOKS:
                self._ring_frozen(step, name, "has never had a gradient")

    def _ring_frozen(self, step: int, name: str, why: str) -> None:
        statistic = "share of the elements of a tensor that a step changed"
        self._bell.ring(FROZEN, step, statistic, value=0.0, threshold=0.0, example=f"{name} {why}")
