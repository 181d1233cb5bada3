"""What the machine gives: memory that was used at most, and the speed that its maker promises."""

import resource
import sys

import torch

_PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bfloat16 operations per second, by a part of the device's name; the first that fits."""


def peak_memory_gib(device: torch.device) -> float:
    """Of this process so far: of its GPU, or resident on a machine without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def peak_flops(device: torch.device) -> float | None:
    """Per second; None where it is not known, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
