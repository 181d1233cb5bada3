"""Which rollouts start, and which batch they come into, where a batch counts tokens: plain Python.

batches within reach   2 of 100 tokens                                             200 tokens are wanted
ready                  1 group that has 2 rollouts of 20 tokens                     40 are there
open                   2 groups of 2 rollouts, each as long as lately: 30 tokens   120 are expected
so one more group starts, with which 220 are expected, and then none
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

REMEMBERED_GROUPS = 64
"""From that many on, each further group weighs as much in the expected length as the last of them did."""


@dataclass
class _StartedGroup:
    env: str
    example: int
    name: str
    num_started: int = 0
    num_over: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of each rollout that did not fail."""

    num_tokens: int = 0
    """Tokens of the rollouts that train."""


class Schedule:
    """One run; environments are named with their weights.

    Rollouts are named `g7-r0`, after the first resume `g7.1-r0`, and at a second attempt `g7-r0~1`.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        batch_tokens: int,
        group_size: int,
        max_inflight: int,
        max_async_level: int,
        max_retries: int,
        longest: int,
        num_batches: int,
    ) -> None:
        total = sum(weights.values())
        self._shares = {env: weight / total for env, weight in weights.items()}
        self._behind = dict.fromkeys(weights, 0.0)
        self._positions = dict.fromkeys(weights, 0)
        self._batch_tokens = batch_tokens
        self._group_size = group_size
        self._max_inflight = max_inflight
        self._max_async_level = max_async_level
        self._max_retries = max_retries
        self._num_batches = num_batches
        self._again: deque[tuple[str, int]] = deque()
        self._open: list[_StartedGroup] = []
        self._running: dict[str, tuple[_StartedGroup, int]] = {}
        """The group of each rollout in flight, and how often it has failed."""
        self._retries: deque[tuple[str, _StartedGroup, int]] = deque()
        self._ready: list[tuple[str, int]] = []
        self._num_groups = self._num_resumes = self._num_known = 0
        self.mean_length = float(longest)
        """Tokens that a rollout is expected to have; before anything is known, as many as it can."""
        self.num_taken = 0
        self.version = 0

    def next_start(self) -> tuple[str, int, str] | None:
        """Returns environment, example and name of the rollout that starts now."""
        if len(self._running) == self._max_inflight:
            return None
        if self._retries:
            name, group, num_failures = self._retries.popleft()
            return self._start(group, f"{name.split('~')[0]}~{num_failures}", num_failures)
        begun = [group for group in self._open if group.num_started < self._group_size]
        if not begun and not self._wants_more():
            return None
        group = begun[0] if begun else self._open_group()
        group.num_started += 1
        return self._start(group, f"{group.name}-r{group.num_started - 1}", 0)

    def _start(self, group: _StartedGroup, name: str, num_failures: int) -> tuple[str, int, str]:
        self._running[name] = group, num_failures
        return group.env, group.example, name

    def _wants_more(self) -> bool:
        """Tells whether what is ready and what is open will not fill the batches within reach."""
        reach = min(self.version + self._max_async_level + 1, self._num_batches) - self.num_taken
        expected = len(self._open) * self._group_size * self.mean_length
        return sum(tokens for _, tokens in self._ready) + expected < reach * self._batch_tokens

    def _open_group(self) -> _StartedGroup:
        """Opens a group of the environment that is furthest behind its share with it."""
        if self._again:
            env, example = self._again.popleft()
        else:
            for each, share in self._shares.items():
                self._behind[each] += share
            env = max(self._behind, key=lambda each: self._behind[each])
            self._behind[env] -= 1
            example = self._positions[env]
            self._positions[env] += 1
        resumed = f".{self._num_resumes}" if self._num_resumes else ""
        group = _StartedGroup(env, example, f"g{self._num_groups}{resumed}")
        self._num_groups += 1
        self._open.append(group)
        return group

    def come_back(self, name: str, turns: Sequence[int], *, has_signal: bool) -> None:
        """Takes a rollout back whose turns, prompts included, have these tokens and are samples of their own.

        Without a signal it has no samples, and is as long as its longest turn.
        """
        group, _ = self._running.pop(name)
        group.lengths.append(sum(turns) if has_signal else max(turns))
        group.num_tokens += sum(turns) if has_signal else 0
        self._end_one(group)

    def fail(self, name: str) -> None:
        group, num_failures = self._running.pop(name)
        if num_failures < self._max_retries:
            self._retries.append((name, group, num_failures + 1))
        else:
            self._end_one(group)

    def _end_one(self, group: _StartedGroup) -> None:
        group.num_over += 1
        if group.num_over < self._group_size:
            return
        self._open.remove(group)
        if group.num_tokens:
            self._ready.append((group.name, group.num_tokens))
        if group.lengths:
            mean = sum(group.lengths) / len(group.lengths)
            self._num_known += 1
            self.mean_length += (mean - self.mean_length) / min(self._num_known + 1, REMEMBERED_GROUPS)

    def take_batch(self) -> list[str] | None:
        """Returns the groups of the next batch, in the order in which they were complete.

        It takes as many as fill it. Without overlap it takes all, once nothing is open.
        """
        is_due = self.num_taken < self._num_batches and self.num_taken - self.version <= self._max_async_level
        if not is_due or sum(tokens for _, tokens in self._ready) < self._batch_tokens:
            return None
        if self._max_async_level == 0 and self._open:
            return None
        taken: list[str] = []
        num_tokens = 0
        while self._ready and (num_tokens < self._batch_tokens or self._max_async_level == 0):
            name, tokens = self._ready.pop(0)
            taken.append(name)
            num_tokens += tokens
        self.num_taken += 1
        return taken

    def resume(self) -> None:
        """Goes on after the run was killed: what was open is attempted again, from the first rollout on."""
        self._again.extend((group.env, group.example) for group in self._open)
        self._open.clear()
        self._running.clear()
        self._retries.clear()
        self._num_resumes += 1
