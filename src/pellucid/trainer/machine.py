"""Peak memory of this process, and the peak speed of its GPU according to the vendor."""

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
"""Dense bfloat16 operations per second, by a part of the device's name; the first match counts."""


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory of this process so far: allocated on its GPU, or resident if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def peak_flops(device: torch.device) -> float | None:
    """Returns operations per second; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
