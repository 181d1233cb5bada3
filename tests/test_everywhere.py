"""Which configurations `make test-everywhere` runs, and what it makes of them."""

import os
from pathlib import Path

import everywhere
from everywhere import Outcome, Setup, counts_of, cpu_flags, failures_of, setups, table


def test_a_cpu_runs_what_it_has_and_the_rest_is_named() -> None:
    chosen, lacking = setups({"sse4_2", "avx", "avx2", "fma"})
    assert [str(setup) for setup in chosen] == [
        "default, 1 thread",
        "default, 2 threads",
        "avx2, 1 thread",
        "avx2, 2 threads",
        "avx2, 1 thread, busy cores",
    ]
    assert lacking == ["avx512"]
    assert setups(set())[1] == ["avx2", "avx512"]


def test_an_environment_sets_instructions_and_threads() -> None:
    assert Setup("avx2", 2).environment() == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "PELLUCID_TEST_THREADS": "2",
        "OMP_NUM_THREADS": "2",
    }


def test_the_table_says_what_failed_where() -> None:
    failed = "FAILED tests/loss/test_losses.py::test_one - assert 1.0 == 2.0 ± 1e-07"
    output = (
        f"F..\n1 test in 3 files\n{failed}\n2 failed, 2579 passed, 60 skipped, 1 error in 421.07s (0:07:01)\n"
    )
    red = Outcome(Setup("avx512", 2), counts_of(output), 421.3, failures_of(output), 1)
    green = Outcome(Setup("default", 1, is_busy=True), counts_of("9 passed in 1.00s"), 1.0)
    assert (red.is_green, green.is_green) == (False, True)
    assert not Outcome(Setup("default", 1), counts_of("no tests ran"), 1.0).is_green
    assert not Outcome(Setup("default", 1), counts_of("9 passed in 1.00s"), 1.0, exit_code=3).is_green
    assert table([red, green]).splitlines() == [
        "configuration                     passed  failed  skipped     time",
        "avx512, 2 threads                   2579       3       60     421s  exit code 1",
        f"    {failed}",
        "default, 1 thread, busy cores          9       0        0       1s",
    ]


def test_a_run_shows_the_threads_and_instructions_it_asks_for(tmp_path, monkeypatch) -> None:
    """In a suite of one test, which finds what was asked for."""
    monkeypatch.setattr(everywhere, "LOGS", tmp_path)
    (tmp_path / "conftest.py").write_text("from workers import torch_threads")
    (tmp_path / "test_here.py").write_text(
        "import torch\n"
        "def test_here(torch_threads):\n"
        "    assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "    assert torch.get_num_threads() == 2\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(everywhere.__file__).parent))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    found = everywhere.run(Setup("default", 2), ["--rootdir", str(tmp_path), str(tmp_path / "test_here.py")])
    assert found.counts == {"passed": 1} and found.is_green
    assert "1 passed" in (tmp_path / "default-2_threads.log").read_text()


def test_the_flags_of_this_cpu_are_read() -> None:
    import torch

    chosen, _ = setups(cpu_flags())
    names = {setup.instructions for setup in chosen}
    own = torch.backends.cpu.get_cpu_capability().lower()
    assert own in names or "ATEN_CPU_CAPABILITY" in os.environ or own not in everywhere.INSTRUCTIONS
