"""Installs torch into the environment of the Python that runs this: the CPU build where there is no GPU.

PyPI's torch for Linux is a CUDA build, which brings gigabytes of NVIDIA libraries along. Before anything is
downloaded, pip is asked what it would take; only metadata is fetched for that.

    GPU, or TORCH=cuda      what the package index offers
    none, or TORCH=cpu      the same if it is a CPU build, otherwise the CPU build of PyTorch's own index
                            (TORCH_CPU_INDEX); never CUDA: if there is no CPU build, this says so and stops

The version is the one of constraints.txt. Needs nothing but the standard library and pip.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = Path(__file__).parent / "constraints.txt"


def requirement() -> str:
    """`torch==2.13.0`, as constraints.txt has it."""
    return re.findall(r"^torch==\S+", CONSTRAINTS.read_text(), re.MULTILINE)[0]


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU: its device, or the driver's tool lists one (as in WSL)."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def pip(*arguments: str) -> list[str]:
    """The command that installs `arguments`, with the versions of constraints.txt."""
    quiet = ("--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS))
    return [sys.executable, "-m", "pip", "install", *quiet, *arguments]


def planned(wanted: str) -> dict[str, str]:
    """Name and version of everything that pip would install, torch among it unless it is there already."""
    done = subprocess.run(pip("--dry-run", "--report", "-", wanted), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: pip finds no {wanted}; see above for the reason")
    items = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {item["name"].lower(): item["version"] for item in items}


def cuda_packages(plan: dict[str, str]) -> list[str]:
    """Those of a CUDA build: NVIDIA's libraries, or torch itself by its tag (`2.13.0+cu130`)."""
    tagged = ["torch"] if "+cu" in plan.get("torch", "") else []
    return tagged + sorted(name for name in plan if name.startswith(("nvidia-", "cuda-")))


def main() -> None:
    wanted, asked = requirement(), os.environ.get("TORCH", "")
    if asked not in ("", "cpu", "cuda"):
        raise SystemExit(f"error: TORCH = {asked!r} is no build of torch; set cpu or cuda, or leave it out")
    plan = planned(wanted)
    if "torch" not in plan:
        print(f"{wanted} is installed")
        return
    is_gpu = has_gpu()
    reason = f"TORCH={asked}" if asked else f"{'an' if is_gpu else 'no'} NVIDIA GPU found"
    cuda = cuda_packages(plan)
    if not cuda or asked == "cuda" or (is_gpu and not asked):
        kind = "a CUDA build, several gigabytes" if cuda else "a CPU build"
        print(f"installing {wanted}: {kind} ({reason})", flush=True)
        raise SystemExit(subprocess.run(pip(wanted)).returncode)
    index = os.environ.get("TORCH_CPU_INDEX") or CPU_INDEX
    print(f"installing {wanted}: the CPU build of {index} ({reason}; TORCH=cuda for CUDA's)", flush=True)
    # Without dependencies: those come from the usual index.
    if subprocess.run(pip("--no-deps", "--index-url", index, wanted)).returncode != 0:
        raise SystemExit(
            f"error: the package index offers {wanted} as a CUDA build only (with {cuda[0]}), and pip finds "
            f"no CPU build at {index} ({reason}); set TORCH_CPU_INDEX=URL to an index that has one, or "
            "TORCH=cuda to download the CUDA build after all"
        )


if __name__ == "__main__":
    main()
