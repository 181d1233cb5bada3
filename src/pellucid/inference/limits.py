"""Numbers of a model that bind in long sequences alone, lowered until they bind in the short ones of a probe.

A window of 4,096 tokens hides nothing from a sequence of 40, and a cache that is wrong beyond it would pass.
So limits are lowered, and whether that changes what the model computes says whether they bind:

    lowered, and the logits change         the probe is short, and sees them bind
    lowered, and they stay the same        the probe is longer than the limit is, with the limit as it is
    as long as any sequence that may come  it never binds
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from pellucid.model.proof import FORWARD_ERRORS

LOWERED = 12
"""Tokens of a lowered limit: less than a probe has, so that its sequences are shorter and longer than it."""

_NAMES = re.compile(r"(window|window_size|chunk_size|index_topk)$")
"""Settings in which families say how many tokens a layer looks at, or takes at a time."""


class Limit(NamedTuple):
    """A setting and its values in the configs and modules that have it."""

    name: str
    values: list[tuple[Any, int]]

    @property
    def largest(self) -> int:
        return max(value for _, value in self.values)


def limits_of(hf: Any, max_length: int) -> list[Limit]:
    """Lists the limits that bind in sequences of up to `max_length` tokens, and not in every short one."""
    configs = {id(hf.config.get_text_config()): hf.config.get_text_config()}
    for module in hf.modules():
        if (config := getattr(module, "config", None)) is not None:
            configs[id(config)] = config
    found: dict[str, list[tuple[Any, int]]] = {}
    for owner in (*configs.values(), *hf.modules()):
        for name, value in vars(owner).items():
            if _NAMES.search(name) and type(value) is int and LOWERED < value < max_length:
                found.setdefault(name, []).append((owner, value))
    return [Limit(name, values) for name, values in found.items()]


@contextmanager
def lowered(limits: Sequence[Limit]) -> Iterator[None]:
    """Context manager: the limits are so low that they bind in a probe."""
    with ExitStack() as stack:
        for limit in limits:
            for owner, value in limit.values:
                stack.callback(setattr, owner, limit.name, value)
                setattr(owner, limit.name, LOWERED)
        yield


def binding(
    limits: Sequence[Limit], compute: Callable[[], Tensor], differ: Callable[[Tensor, Tensor], bool]
) -> list[Limit]:
    """Returns the limits that change what `compute` gives when they are lowered."""
    if not limits:
        return []
    found, own = [], compute()
    for limit in limits:
        try:
            with lowered([limit]):
                is_bound = differ(compute(), own)
        except FORWARD_ERRORS:  # it shapes something that was made before
            continue
        if is_bound:
            found.append(limit)
    return found
