"""Threads and processes beside the event loop, and the cores that there are for them."""

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pellucid import workers
from pellucid.config import InferenceConfig, InferenceRunConfig, ModelConfig, TrainerRunConfig
from pellucid.errors import ModelError
from pellucid.inference.server import run_inference
from pellucid.launch.preflight import free_port
from pellucid.trainer.build import load_trained
from pellucid.trainer.parallel import Ranks
from pellucid.workers import DaemonThreads, num_cores

_FAULTS = """
import ctypes, resource
from concurrent.futures import ThreadPoolExecutor
from pellucid.workers import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [libc.malloc(4 << 20) for _ in range(8)]
        for block in blocks:
            ctypes.memset(block, 1, 4 << 20)
        for block in blocks:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

as_it_is = faults()
keep_freed_memory()
print(as_it_is, min(faults() for _ in range(2)))
with ThreadPoolExecutor(1) as thread:
    print(min(thread.submit(faults).result() for _ in range(2)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's memory")
def test_freed_memory_is_used_again_without_asking_the_system_for_its_pages() -> None:
    answer = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    as_it_is, kept, kept_in_thread = map(int, answer.stdout.split())
    assert max(kept, kept_in_thread) < 100 < as_it_is  # of 20 · 8 · 1024 pages


def test_threads_of_a_pool_work_side_by_side_and_end_with_the_process() -> None:
    pool = DaemonThreads(max_threads=2)
    meet = threading.Barrier(2)
    assert [future.result() >= 0 for future in [pool.submit(meet.wait), pool.submit(meet.wait)]] == [True] * 2
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    assert pool.submit(pow, 2, 5).result() == 32
    assert pool.submit(threading.current_thread).result().daemon

    hold = threading.Event()
    running = [pool.submit(hold.wait) for _ in range(2)]
    waiting = pool.submit(pow, 2, 5)
    while not all(future.running() for future in running):
        time.sleep(0.001)
    pool.shutdown(wait=True)  # waits for nothing all the same
    assert waiting.cancelled() and not any(future.done() for future in running)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(pow, 2, 5)
    hold.set()
    assert [future.result() for future in running] == [True] * 2


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 3),
        ("150000 100000", 2),
        ("20000 100000", 1),
        ("800000 100000", 3),
        ("nonsense", 3),
        (None, 3),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, cores: int
) -> None:
    allow(monkeypatch, 3)
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(f"{quota}\n")
    assert num_cores(path) == cores


def allow(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Lets this process see so many cores, and no quota."""
    monkeypatch.setattr(workers, "CPU_QUOTA", Path("nowhere"))
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5, 5 + cores)))
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)


def start_trainer(folder: Path) -> None:
    load_trained(TrainerRunConfig(model=ModelConfig(name=str(folder))), Ranks())


def start_inference(folder: Path) -> None:
    settings = InferenceConfig(port=free_port("127.0.0.1", 0))
    run_inference(
        InferenceRunConfig(model=ModelConfig(name=str(folder)), inference=settings, output_dir=folder)
    )


@pytest.fixture
def torch_threads_as_before() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("torch_threads_as_before")
@pytest.mark.parametrize("start", [start_trainer, start_inference])
@pytest.mark.parametrize("cores", [1, 3])
def test_a_part_computes_with_as_many_threads_as_it_has_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Callable[[Path], None], cores: int
) -> None:
    """They get as far as the model, which is not there."""
    allow(monkeypatch, cores)
    torch.set_num_threads(2)
    with pytest.raises(ModelError):
        start(tmp_path)
    assert torch.get_num_threads() == cores


def test_a_pool_has_as_many_threads_as_the_cores_need(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 1)
    pool, hold = DaemonThreads(name="few"), threading.Event()
    waiting = [pool.submit(hold.wait) for _ in range(9)]
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("few_")}
    hold.set()
    assert names == {f"few_{number}" for number in range(1, 6)}
    assert all(future.result() for future in waiting)
    pool.shutdown()
