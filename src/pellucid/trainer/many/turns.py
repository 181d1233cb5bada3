"""Chooses the samples of a round: runs take turns under a budget of tokens, so that no run waits long.

    waiting  a: 5 5 5 5    b: 3 3 3    budget 16
    round 1  a: 5 5        b: 3 3          16 tokens: the next sample is of the run with fewest tokens
    round 2  a: 5 5        b: 3

The run with fewest tokens is never above its share. So with k runs none gets more than budget ÷ k tokens plus
one sample. Once a run has no more samples, the others use the rest of its share.
"""

from collections.abc import Mapping, Sequence


def take_turns(waiting: Mapping[str, Sequence[int]], budget: int, *, first: int = 0) -> dict[str, int]:
    """Counts how many of each run's next samples a round takes, given their lengths; at least one in all.

    `first` is the index of the run that is preferred among those with equally many tokens.
    """
    names = list(waiting)
    order = [names[(first + index) % len(names)] for index in range(len(names))] if names else []
    taken = dict.fromkeys(order, 0)
    num_tokens = dict.fromkeys(order, 0)
    while open_runs := [name for name in order if taken[name] < len(waiting[name])]:
        name = min(open_runs, key=num_tokens.__getitem__)
        length = waiting[name][taken[name]]
        total = sum(num_tokens.values())
        if total and total + length > budget:
            break
        taken[name] += 1
        num_tokens[name] += length
    return {name: count for name, count in taken.items() if count}
