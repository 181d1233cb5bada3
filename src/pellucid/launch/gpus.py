"""Which process of a run on one machine has which GPUs.

    visible GPUs      0 1 2 3 4 5 6 7           CUDA_VISIBLE_DEVICES, or all of the machine's
    trainer           0 1 2 3 4 5               a process on each
    inference                     6             a server on every `gpus_per_server`
    inference_1                     7

Every GPU has at most one owner, except on a machine with a single one, which all processes share. Without
GPUs nothing is placed, and a run is what it was. GPUs are counted without torch: the launcher holds none.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.config import RLConfig
from pellucid.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROC = Path("/proc/driver/nvidia/gpus")
_COUNT_TIMEOUT_S = 30


def count_gpus() -> int:
    """Counts the machine's NVIDIA GPUs, whichever of them this process may use."""
    if (command := shutil.which("nvidia-smi")) is not None:
        try:
            listed = subprocess.run(
                [command, "--list-gpus"], capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            listed = None
        if listed is not None and listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0


def visible_gpus(environment: Mapping[str, str], count: Callable[[], int] = count_gpus) -> tuple[str, ...]:
    """Names the GPUs that this process may use, as CUDA_VISIBLE_DEVICES does: by number or UUID.

    As in CUDA, names behind one that does not exist count for nothing: `0,9,1` of two GPUs is `0`.
    """
    num_gpus = count()
    if num_gpus == 0 or (names := environment.get(VISIBLE)) is None:
        return tuple(str(number) for number in range(num_gpus))
    found: list[str] = []
    for name in (name.strip() for name in names.split(",")):
        is_number = name.lstrip("-").isdigit()
        if not name or name in found or (is_number and not 0 <= int(name) < num_gpus):
            break
        found.append(name)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of each process that computes, by name; all empty on a machine without GPUs."""

    trainer: tuple[str, ...] = ()
    """One per process of the trainer."""

    servers: tuple[tuple[str, ...], ...] = ()
    """GPUs of each of the policy's servers."""

    teacher: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    """GPUs that nobody has, because they are not enough for one more process or server."""

    @property
    def is_shared(self) -> bool:
        return bool(self.trainer) and self.trainer in self.servers

    def lines(self) -> list[str]:
        """Says who has which GPUs, a line each."""
        owners = {"trainer": self.trainer}
        owners |= {
            f"inference_{number}" if number else "inference": own for number, own in enumerate(self.servers)
        }
        owners |= {"teacher": self.teacher, "idle": self.idle}
        lines = [f"{owner}: GPU {', '.join(own)}" for owner, own in owners.items() if own]
        if self.is_shared:
            lines.append("they share one GPU: with vLLM, leave the trainer room by gpu_memory_utilization")
        return lines


NO_GPUS = Placement()


def place(config: RLConfig, visible: Sequence[str]) -> Placement:
    """Divides the visible GPUs; raises ConfigError if they are too few for what the configuration asks."""
    gpus, size = config.gpus, config.inference.gpus_per_server
    asked = {name: number for name, number in gpus.model_dump().items() if number is not None}
    if not visible:
        if asked:
            key, number = next(iter(asked.items()))
            raise ConfigError(
                f"gpus.{key} = {number}, but no GPU is visible here (`nvidia-smi`, {VISIBLE}); leave [gpus] "
                "out to run on the CPU"
            )
        return NO_GPUS
    if gpus.total is not None and gpus.total > len(visible):
        raise ConfigError(
            f"gpus.total = {gpus.total} exceeds the {len(visible)} GPU(s) that are visible here "
            f"({VISIBLE}); lower it"
        )
    free = tuple(visible[: gpus.total])
    trains = config.trainer.join is None
    num_teacher = (gpus.teacher or size) if config.serves_teacher else 0
    if len(free) == 1 and size == 1 and max(gpus.trainer or 1, config.trainer.num_processes) == 1:
        return Placement(free if trains else (), (free,), free if num_teacher else ())
    num_trainer, num_inference = _shares(config, len(free) - num_teacher)
    idle = len(free) - num_trainer - num_inference - num_teacher
    if idle < 0 or num_inference < size or (trains and num_trainer < 1):
        raise ConfigError(_too_few(config, len(free), num_trainer, num_inference, num_teacher))
    trainer, rest = free[:num_trainer], free[num_trainer:]
    servers = tuple(rest[start : start + size] for start in range(0, num_inference, size))
    rest = rest[num_inference:]
    return Placement(trainer, servers, rest[:num_teacher], rest[num_teacher:])


def _shares(config: RLConfig, num_free: int) -> tuple[int, int]:
    """Returns GPUs of trainer and policy servers, of those that a teacher leaves; the sum may exceed them."""
    gpus, size = config.gpus, config.inference.gpus_per_server
    model = config.trainer.model
    together = model.dp_replicate * model.cp
    trainer, inference = gpus.trainer, gpus.inference
    if config.trainer.join is not None:
        trainer = 0
    elif trainer is None and config.trainer.num_processes > 1:
        trainer = config.trainer.num_processes
    if inference is None:
        inference = num_free // 2 if trainer is None else num_free - trainer
        inference = max(size, inference - inference % size)
    if trainer is None:
        trainer = max(num_free - inference, 0)
        trainer = max(together, trainer - trainer % together)
    return trainer, inference


def _too_few(config: RLConfig, total: int, trainer: int, inference: int, teacher: int) -> str:
    """Names what does not fit; a number that is set by a key, by that key."""
    gpus, model = config.gpus, config.trainer.model
    of_trainer = f"gpus.trainer = {trainer}"
    if gpus.trainer is None:
        of_trainer = f"trainer.num_processes = {trainer}"
        if config.trainer.num_processes == 1:
            together = f"trainer.model.dp_replicate = {model.dp_replicate} × trainer.model.cp = {model.cp}"
            of_trainer = f"{trainer} for the trainer ({together})"
    of_inference = f"gpus.inference = {inference}"
    if gpus.inference is None:
        of_inference = f"{inference} for a server ({config.inference.server_size})"
    parts = [of_trainer, of_inference, *([f"{teacher} for the teacher"] if teacher else [])]
    return (
        f"{' + '.join(parts)} exceeds the {total} GPU(s) that the run may use (gpus.total, {VISIBLE}); lower "
        "one of them, or let the run see more"
    )


def with_placement(config: RLConfig, placement: Placement) -> RLConfig:
    """Returns `config` with the numbers of GPUs and of the trainer's processes that `placement` decided."""
    if not placement.servers:
        return config
    used = [*placement.trainer, *placement.teacher, *(name for own in placement.servers for name in own)]
    numbers = {
        "total": len(set(used)) + len(placement.idle),
        "trainer": len(placement.trainer) or None,
        "inference": sum(map(len, placement.servers)),
        "teacher": len(placement.teacher) or None,
    }
    trainer = config.trainer.model_copy(update={"num_processes": max(1, len(placement.trainer))})
    return config.model_copy(update={"gpus": config.gpus.model_copy(update=numbers), "trainer": trainer})
