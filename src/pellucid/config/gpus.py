"""`[gpus]`: who has which GPUs of a machine; and the GPUs that are known by name.

The figures are those of the vendor's data sheets, without sparsity; docs/sizing.md names the sheets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from pellucid.config.base import Section


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU, by the figures that sizes and times follow from."""

    device_name: str
    """Part of the name by which the driver calls it."""

    memory_gb: float
    """Memory in units of 10⁹ bytes that a program may take: what the driver shows, not what the box says."""

    tflops: float
    """Dense bfloat16 operations per second, in units of 10¹²."""

    memory_gb_s: float
    """Bandwidth of its memory."""

    link_gb_s: float
    """Bandwidth to the other GPUs of its machine in one direction: NVLink, or PCIe where there is none."""


KNOWN_GPUS: Mapping[str, GpuModel] = {
    "a100-40": GpuModel("A100-SXM4-40GB", 42.4, 312, 1555, 300),
    "a100-80": GpuModel("A100", 85.0, 312, 2039, 300),
    "h100-pcie": GpuModel("H100 PCIe", 85.0, 756, 2000, 64),
    "h100": GpuModel("H100", 85.0, 989, 3350, 450),
    "h200": GpuModel("H200", 150.7, 989, 4800, 450),
    "b200": GpuModel("B200", 191.5, 2250, 7700, 900),
    "l40s": GpuModel("L40S", 48.3, 362, 864, 32),
    "l4": GpuModel("NVIDIA L4", 24.1, 121, 300, 32),
    "rtx4090": GpuModel("RTX 4090", 25.7, 165, 1008, 32),
}
"""GPUs by the name that `pellucid plan --gpu` takes; the first whose `device_name` fits a device is its."""


class GpusConfig(Section):
    """GPUs of this machine, shared out to the processes of `pellucid rl`; `gpus = 8` is `gpus.total = 8`."""

    total: int | None = Field(default=None, ge=1)
    """GPUs that the run may use, the first of those that are visible; default: all. For `pellucid plan`,
    those of all machines together; default: one machine."""

    trainer: int | None = Field(default=None, ge=1)
    """GPUs of the trainer, which has a process on each. Default: `trainer.num_processes` if that is set, else
    those that the others leave."""

    inference: int | None = Field(default=None, ge=1)
    """GPUs of the policy's servers: as many servers as `inference.vllm.tensor_parallel_size` (1 for the
    embedded engine) fits into them. Default: half of the GPUs, or what the others leave."""

    teacher: int | None = Field(default=None, ge=1)
    """GPUs of the server of `orchestrator.teacher.model`; it needs `inference.vllm.tensor_parallel_size`,
    which is the default."""

    @model_validator(mode="before")
    @classmethod
    def _total_alone(cls, data: Any) -> Any:
        return {"total": data} if isinstance(data, int | str) and not isinstance(data, bool) else data

    def problems(self) -> Iterator[str]:
        given = {name: getattr(self, name) for name in ("trainer", "inference", "teacher")}
        named = {name: number for name, number in given.items() if number is not None}
        # One GPU is shared by all.
        if self.total is not None and self.total > 1 and sum(named.values()) > self.total:
            parts = " + ".join(f"gpus.{name} = {number}" for name, number in named.items())
            yield f"{parts} exceeds gpus.total = {self.total}; lower one of them, or raise gpus.total"
