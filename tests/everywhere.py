"""The whole suite on every machine that this one can pretend to be: `make test-everywhere`.

Rounding depends on the instruction set that torch's kernels are compiled for and on the number of threads;
order and timing depend on what else the cores do. Each configuration is a run of the suite of its own:

    instructions   default, avx2, avx512: ATEN_CPU_CAPABILITY; what the CPU lacks is skipped, and said
    threads        1 and 2 in torch
    busy           the widest instruction set, with every core kept busy by something else

Arguments go to pytest: `python tests/everywhere.py -n 2 tests/loss`. Exits with 1 if a configuration fails;
its output stays in `outputs/everywhere/`.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "outputs" / "everywhere"
INSTRUCTIONS = {"default": set[str](), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl"}}
"""What the CPU has to have for torch to use each, by the names of /proc/cpuinfo."""


@dataclass(frozen=True)
class Setup:
    """One configuration of the suite."""

    instructions: str
    num_threads: int
    is_busy: bool = False

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.instructions}, {threads}{', busy cores' if self.is_busy else ''}"

    def environment(self) -> dict[str, str]:
        threads = str(self.num_threads)
        return {
            "ATEN_CPU_CAPABILITY": self.instructions,
            "PELLUCID_TEST_THREADS": threads,
            "OMP_NUM_THREADS": threads,
        }


@dataclass(frozen=True)
class Outcome:
    """The last line of pytest, and how long it took."""

    setup: Setup
    counts: dict[str, int]
    duration_s: float
    failures: Sequence[str] = ()
    """`FAILED tests/…::test_… - why`, as pytest sums up."""

    exit_code: int = 0
    """That of pytest: 2 to 5 where it was interrupted, broke or found no test."""

    @property
    def is_green(self) -> bool:
        is_clean = not self.counts.keys() & {"failed", "error", "errors"}
        return self.exit_code == 0 and self.counts.get("passed", 0) > 0 and is_clean


def setups(flags: set[str]) -> tuple[list[Setup], list[str]]:
    """Those that a CPU with these flags can run, and the instruction sets that it lacks."""
    offered = [name for name, needed in INSTRUCTIONS.items() if needed <= flags]
    plain = [Setup(name, threads) for name in offered for threads in (1, 2)]
    return [*plain, Setup(offered[-1], 1, is_busy=True)], [
        name for name in INSTRUCTIONS if name not in offered
    ]


def cpu_flags() -> set[str]:
    """As Linux lists them; elsewhere none, so that only the default is run."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split(":", 1)[1].split()}


def counts_of(output: str) -> dict[str, int]:
    """`2 failed, 2579 passed in 421.07s` -> {"failed": 2, "passed": 2579}: the last such line."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1])} if lines else {}


def failures_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def table(outcomes: list[Outcome]) -> str:
    """A line for each configuration; below it, what failed there."""
    lines = [f"{'configuration':<32} {'passed':>7} {'failed':>7} {'skipped':>8} {'time':>8}"]
    for each in outcomes:
        failed = sum(each.counts.get(name, 0) for name in ("failed", "error", "errors"))
        figures = (each.counts.get("passed", 0), failed, each.counts.get("skipped", 0))
        line = f"{each.setup!s:<32} {figures[0]:>7} {figures[1]:>7} {figures[2]:>8} {each.duration_s:>7.0f}s"
        lines.append(line if each.is_green else f"{line}  exit code {each.exit_code}")
        lines += [f"    {failure}" for failure in each.failures]
    return "\n".join(lines)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Two processes per core that do nothing but compute, as long as the context is open."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=_spin, daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.terminate()
            spinner.join()


def _spin() -> None:
    while True:
        sum(range(100_000))


def run(setup: Setup, arguments: list[str]) -> Outcome:
    """Runs the suite, shows what pytest prints, and keeps it."""
    LOGS.mkdir(parents=True, exist_ok=True)
    print(f"\n== {setup}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", *arguments]
    output = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | setup.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            print(line, end="", flush=True)
    (LOGS / f"{setup}.log".replace(", ", "-").replace(" ", "_")).write_text(output)
    duration_s = time.monotonic() - started
    return Outcome(setup, counts_of(output), duration_s, failures_of(output), process.returncode)


def main(arguments: list[str]) -> int:
    chosen, lacking = setups(cpu_flags())
    outcomes = []
    for setup in chosen:
        if setup.is_busy:
            with busy_cores():
                outcomes.append(run(setup, arguments))
        else:
            outcomes.append(run(setup, arguments))
    print(f"\n{table(outcomes)}")
    for name in lacking:
        print(f"{name}: skipped, this CPU has no such instructions")
    return 0 if all(outcome.is_green for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
