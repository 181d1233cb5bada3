"""`pellucid doctor`: one JSON file about this machine, for whoever is to help with a first run.

    versions       Python, pellucid, torch, CUDA, NCCL, vLLM, transformers; operating system
    devices        GPUs with memory, clocks and limits; processor, cores, memory, disk
    links          nvidia-smi's topology, network cards of InfiniBand and their rates
    environment    variables of NCCL, CUDA, torch, OpenMP and vLLM, without anything that may be a secret
    benchmark      matrix product, attention, copy, all-reduce on the devices that are there
    verify         results of `pellucid verify` on its own tiny model

A part that fails is recorded with its error and ends nothing. Host name, user name, home folder, IP addresses
and serial numbers of GPUs are replaced; no file of yours is read.
"""

import getpass
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from pellucid import __version__
from pellucid.config.tools import DoctorSettings
from pellucid.data.files import replace_file
from pellucid.launch.gpus import count_gpus
from pellucid.launch.rl import places
from pellucid.workers import num_cores

FORMAT = 1
COMMAND_TIMEOUT_S = 20
REDUCE_TIMEOUT_S = 25
_PACKAGES = (
    "torch", "transformers", "vllm", "peft", "safetensors", "tokenizers", "numpy", "pyarrow", "pydantic",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "triton",
)  # fmt: skip
_SHOWN = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_", "VLLM_", "UCX_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|ID_FILE", re.IGNORECASE)
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7}\b")
_SERIAL = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")
_INFINIBAND = Path("/sys/class/infiniband")

Examination = Callable[[], Any]


def run_doctor(config: DoctorSettings) -> int:
    """Writes the file and says what is in it; the exit code is 0 even if parts failed: that is a result."""
    parts: dict[str, Examination] = {
        "versions": versions,
        "devices": devices,
        "links": links,
        "environment": lambda: shown_environment(os.environ),
        "benchmark": benchmark,
    }
    if config.verify:
        parts["verify"] = lambda: verify_results(config.timeout_s)
    found = examine(parts, private_words())
    report = {"format": FORMAT, "pellucid": __version__, "parts": found}
    replace_file(config.output, orjson.dumps(report, option=orjson.OPT_INDENT_2))
    for name, part in found.items():
        print(f"{name:<12} {part['seconds']:6.1f} s  {'; '.join(failures(part)) or 'ok'}")
    print(f"{config.output}: send this file. It has no host, user or folder names, addresses or keys.")
    return 0


def examine(parts: Mapping[str, Examination], private: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Calls every part, and returns its value or its error, without `private` words.

    Addresses are replaced in errors, of which those of the network have some; in values, versions look alike.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        started = time.monotonic()
        try:
            outcome: dict[str, Any] = {"ok": True, "value": part()}
        except Exception as error:  # whatever is broken here is what the file is for
            outcome = {"ok": False, "error": _ADDRESS.sub("ADDRESS", f"{type(error).__name__}: {error}")}
        found[name] = scrubbed(outcome, private) | {"seconds": round(time.monotonic() - started, 2)}
    return found


def failures(part: Any, name: str = "") -> Iterator[str]:
    """Yields the errors of a part and of the measures in it, each with its name."""
    if isinstance(part, dict):
        if part.get("ok") is False:
            yield f"{name} failed: {part['error']}".lstrip()
        for key, inner in part.items():
            yield from failures(inner, name if key == "value" else f"{name} {key}".lstrip())


def private_words() -> dict[str, str]:
    """Returns words that must not leave this machine, and what stands for each."""
    words = {str(Path.home()): "~", str(Path.cwd()): "."}
    with suppress(OSError):
        words |= {name: "HOST" for name in (socket.gethostname(), socket.getfqdn())}
    with suppress(OSError, KeyError):
        words[getpass.getuser()] = "USER"
    # Short names occur in other words: a user called `a` would empty the file.
    return {
        word: shown for word, shown in words.items() if len(word) > 2 and word not in ("root", "localhost")
    }


def scrubbed(value: Any, private: Mapping[str, str]) -> Any:
    """Replaces private words and serial numbers in every string of a value, keys included."""
    match value:
        case dict():
            return {scrubbed(key, private): scrubbed(item, private) for key, item in value.items()}
        case list() | tuple():
            return [scrubbed(item, private) for item in value]
        case str():
            for word in sorted(private, key=len, reverse=True):
                value = value.replace(word, private[word])
            return _SERIAL.sub(r"\1-SERIAL", value)
        case _:
            return value


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
    }
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    import torch

    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def devices() -> dict[str, Any]:
    import torch

    disk = shutil.disk_usage(Path.cwd())
    pages = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}
    return {
        "cores": num_cores(),
        "cores_of_machine": os.cpu_count(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": pages["SC_PAGE_SIZE"] * pages["SC_PHYS_PAGES"],
        "disk_bytes": {"total": disk.total, "free": disk.free},
        "shared_memory_bytes": _shared_memory(),
        "gpus_of_machine": count_gpus(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "nvidia_smi": _said(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm,ecc.mode.current",
            "--format=csv",
        ),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _shared_memory() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def _gpu(index: int) -> dict[str, Any]:
    import torch

    about = torch.cuda.get_device_properties(index)
    return {
        "name": about.name,
        "memory_bytes": about.total_memory,
        "capability": f"{about.major}.{about.minor}",
        "multi_processors": about.multi_processor_count,
        "peers": [
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ],
    }


def links() -> dict[str, Any]:
    ports = sorted(_INFINIBAND.glob("*/ports/*/rate")) if _INFINIBAND.is_dir() else []
    return {
        "topology": _said("nvidia-smi", "topo", "-m"),
        "nvlink": _said("nvidia-smi", "nvlink", "--status"),
        "infiniband": {f"{port.parts[-4]}/{port.parts[-2]}": port.read_text().strip() for port in ports},
    }


def _said(*words: str) -> str:
    """Returns what a command printed; or why it did not."""
    if shutil.which(words[0]) is None:
        return f"{words[0]} is not installed"
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    return done.stdout if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()}"


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that change how a run computes, without secrets and addresses."""
    return {
        name: _ADDRESS.sub("ADDRESS", value)
        for name, value in sorted(environment.items())
        if name.startswith(_SHOWN) and not _SECRET.search(name)
    }


def benchmark() -> dict[str, Any]:
    """Measures each device for a moment; a measure that fails is recorded beside the others."""
    import torch

    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    measures: dict[str, Callable[[torch.device], float]] = {
        "matmul_tflops": _matmul,
        "attention_tflops": _attention,
        "copy_gb_s": _copy,
    }
    found: dict[str, Any] = {}
    for name in names:
        device = torch.device(name)
        found[name] = examine({key: partial(measure, device) for key, measure in measures.items()}, {})
    found["all_reduce"] = examine({"gb_s": lambda: all_reduce(max(2, torch.cuda.device_count()))}, {})
    return found


def _rate(device: Any, work: Callable[[], object], amount: float) -> float:
    """Returns `amount` per second of the fastest of a few calls."""
    import torch

    best = float("inf")
    started = time.monotonic()
    work()
    while time.monotonic() - started < 1.0:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return round(amount / best, 3)


def _matmul(device: Any) -> float:
    import torch

    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return _rate(device, lambda: left @ right, 2 * size**3 / 1e12)


def _attention(device: Any) -> float:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    on_gpu = device.type == "cuda"
    heads, tokens, dtype = (32, 8192, torch.bfloat16) if on_gpu else (4, 512, torch.float32)
    width = 128
    states = torch.ones(1, heads, tokens, width, device=device, dtype=dtype)
    operations = 4 * heads * width * tokens**2 / 2
    attend = partial(scaled_dot_product_attention, states, states, states, is_causal=True)
    return _rate(device, attend, operations / 1e12)


def _copy(device: Any) -> float:
    """Bandwidth of reading and writing the device's own memory."""
    import torch

    num_bytes = 1 << (30 if device.type == "cuda" else 26)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(device, lambda: target.copy_(source), 2 * num_bytes / 1e9)


def all_reduce(num_processes: int, timeout_s: float = REDUCE_TIMEOUT_S) -> float:
    """Sums an array over processes, one per GPU or two on a CPU; returns the bus bandwidth in GB/s."""
    program = "from pellucid.checks.doctor import reduce_here; reduce_here()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for place in places(num_processes)
    ]
    outputs = _ended(children, timeout_s)
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"a process ended with code {child.returncode}: {errors[-2000:]}")
    rate: float = json.loads(outputs[0][0].splitlines()[-1])
    return rate


def _ended(children: Sequence["subprocess.Popen[str]"], timeout_s: float) -> list[tuple[str, str]]:
    """Waits for processes, and kills them once the time is over; returns what each printed."""
    until = time.monotonic() + timeout_s
    try:
        return [child.communicate(timeout=max(0.1, until - time.monotonic())) for child in children]
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"not done after {timeout_s:g} s") from error
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()


def reduce_here() -> None:
    """Takes part in `all_reduce`, as one process of it; the first prints the bandwidth."""
    import torch
    from torch import distributed as dist

    from pellucid.model.load import default_device
    from pellucid.trainer.parallel import group_options, own_gpu

    device = default_device()
    if device.type == "cuda":
        device = own_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(**group_options(device, 10 * REDUCE_TIMEOUT_S))  # the parent ends it earlier
    size = dist.get_world_size()
    values = torch.ones(1 << (28 if device.type == "cuda" else 20), device=device)
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        before = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - before)
    if dist.get_rank() == 0:
        print(round(values.nbytes * 2 * (size - 1) / size / best / 1e9, 3))
    dist.destroy_process_group()


def verify_results(timeout_s: float) -> dict[str, Any]:
    """Runs `pellucid verify --json` in a process of its own; returns its exit code and findings."""
    child = subprocess.Popen(
        [sys.executable, "-m", "pellucid.cli", "verify", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ((output, errors),) = _ended([child], timeout_s)
    findings = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {"exit_code": child.returncode, "findings": findings, "errors": errors[-4000:]}
