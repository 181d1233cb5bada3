"""Shared by all tests: tiny models made on the spot, golden cases, small disks."""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings

from pellucid.ending import LAUNCHER_PIPE, ProcessReport, describe_pipe, say
from workers import (  # noqa: F401
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_xdist_make_scheduler,
    torch_threads,
)

# Nothing is asked of the Hugging Face Hub: without a network it is tried five times, which takes 40 seconds.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts the suite in the background has it ignore SIGINT, and so would every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Summaries that the viewer keeps are those of the tests, not of whoever runs them."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


GOLDEN = Path(__file__).parent / "golden"

# How fast a machine is says nothing about what it runs. In CI the same examples are tried every time, so that
# a change is judged by what it changes; everywhere else new ones are looked for.
settings.register_profile(
    "pellucid",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("pellucid")


def golden_cases(name: str) -> list[Any]:
    """The cases of a golden file as pytest parameters; `{"nonfinite": …}` becomes that number."""
    cases = json.loads((GOLDEN / f"{name}.json").read_text(), object_hook=_nonfinite)["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def _nonfinite(value: dict[str, Any]) -> Any:
    if value.keys() == {"nonfinite"}:
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["nonfinite"]]
    return value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.golden("loss_rl")` runs a test once per case, as its argument `case`."""
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is not None:
        metafunc.parametrize("case", golden_cases(*marker.args))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer model (grouped-query attention) and its character tokenizer."""
    from pellucid.model.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    return folder


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer SmolVLM, its character tokenizer and its image processor."""
    from pellucid.model.tiny import make_tiny_vision_model

    folder = tmp_path_factory.mktemp("vision_model")
    make_tiny_vision_model(folder, hidden_size=32)
    return folder


class Launcher:
    """The launcher's end of the pipe from this process."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def hear(self) -> ProcessReport:
        return msgspec.json.decode(self._pipe.readline(), type=ProcessReport)

    def doings(self) -> list[str]:
        """What was said until now to be done, in this order."""
        say("the end")
        words = iter(self.hear, None)
        said = takewhile(lambda word: word.doing != "the end", words)
        return [word.doing for word in said if word.doing]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """This process has a launcher, and tells it how it ends."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    monkeypatch.setenv(LAUNCHER_PIPE, describe_pipe(theirs))
    with open(ours, "rb") as pipe:
        yield Launcher(pipe)
    os.close(theirs)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of three layers, the first and the last with eight experts."""
    from pellucid.model.tiny import make_tiny_moe_model

    folder = tmp_path_factory.mktemp("moe")
    make_tiny_moe_model(folder, hidden_size=32, dense_layers=[1])
    return folder


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Path]]:
    """`with small_disk("256k") as folder`: a disk of its own with so much room; only root may mount one.

    `at`: the folder, which is made; default: a new one.
    """

    @contextmanager
    def mounted(size: str, at: Path | None = None) -> Iterator[Path]:
        folder = at or tmp_path_factory.mktemp("disk")
        folder.mkdir(parents=True, exist_ok=True)
        if not _sees_its_own_mounts() or not _mount(
            "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)
        ):
            pytest.skip("needs the right to mount a tmpfs")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)

    return mounted


@cache
def _sees_its_own_mounts() -> bool:
    """From now on what is mounted is seen by this process and its children alone, and goes with them."""
    clone_newns = 0x00020000
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(clone_newns) != 0:
        return False
    return _mount("--make-rprivate", "/")


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
