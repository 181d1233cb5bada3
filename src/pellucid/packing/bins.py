"""First-fit decreasing: the longest sequence first, each into the first bin with room."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`; a longer sequence gets a bin alone.

    pack([5, 3, 4, 9], 8) -> [[3], [0, 1], [2]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(capacity - lengths[index])
    return bins
