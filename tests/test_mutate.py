"""The mutation harness: mutants have one change each, runs are compared by what they left."""

import ast
import json
import runpy
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

import mutate
from effects import Facts, difference, facts_of
from mutants import Mutant, all_mutants, mutants_of, rooms
from mutate import Answer, read, report, stratified, verdict_of, wait_unless_idle, wilson
from mutated import record_lines

PACKAGE = Path(__file__).parents[1] / "src" / "pellucid"


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a + b", {"flip: a + b -> a - b"}),
        ("x = -a", {"flip: -a -> a"}),
        ("x = a < b", {"flip: a < b -> a > b"}),
        ("f(a, b)", {"drop: f(a, b) -> pass", "swap: f(a, b) -> f(b, a)"}),
        ("f(a, a)", {"drop: f(a, a) -> pass"}),
        ("x += a", {"flip: x += a -> x -= a", "drop: x += a -> pass"}),
        ("x = 3.0", {"scale: 3.0 -> 6.0"}),
        ("x = 0", {"scale: 0 -> 1"}),
        ("x = a[:n]", {"shift: a[:n] -> a[:n + 1]"}),
        ("x = a[1:]", {"shift: a[1:] -> a[2:]"}),
        ("x = a[0]", {"shift: a[0] -> a[1]"}),
        ("x = True", {"scale: True -> False"}),
        ("x = a and b", {"flip: a and b -> a or b"}),
        ("x = a & b", {"flip: a & b -> a | b"}),
        ("x = ~a", {"flip: ~a -> a"}),
        ("x = a is b", {"flip: a is b -> a is not b"}),
        ("x = a not in b", {"flip: a not in b -> a in b"}),
        ("x = a // b", {"flip: a // b -> a * b"}),
        ("x = a % b", {"flip: a % b -> a // b"}),
        ("x = a < b <= c", {"flip: a < b <= c -> a > b <= c", "flip: a < b <= c -> a < b >= c"}),
        ("x = max(a)", {"extreme: max(a) -> min(a)"}),
        ("x = a.amin(b)", {"extreme: a.amin(b) -> a.amax(b)"}),
        ("x = f(c, a, b)", {"swap: f(c, a, b) -> f(a, c, b)", "swap: f(c, a, b) -> f(c, b, a)"}),
        ("x.y = a", {"drop: x.y = a -> pass"}),
        ("x[y] = a", {"drop: x[y] = a -> pass"}),
        ("if a: b", {"negate: a -> not a"}),
        ("if a == b: c", {"flip: a == b -> a != b"}),
        ("if not a: b", {"flip: not a -> a"}),
        ("raise ValueError(a + b)", set()),
        ("logger.info('%s', a + b)", set()),
        ("log.info('%s', a + b)", set()),
        ("def f(a: g(1, 2)) -> g(1, 2):\n    'A docstring.'", set()),
    ],
)
def test_a_mutant_has_one_change(source: str, mutants: set[str]) -> None:
    found = list(mutants_of("file.py", source))
    assert {mutant.name.partition(" ")[2] for mutant in found} == mutants
    for mutant in found:
        before, after = mutant.name.split(": ")[1].split(" -> ")
        assert ast.dump(ast.parse(mutant.source)) == ast.dump(ast.parse(source.replace(before, after)))


def test_every_room_has_mutants_that_are_python_and_have_names_of_their_own() -> None:
    mutants = all_mutants(PACKAGE)
    assert {mutant.file for mutant in mutants} <= set(rooms(PACKAGE))
    assert {"loss/functions.py", "trainer/step.py", "packing/plan.py"} <= {mutant.file for mutant in mutants}
    some = [mutant for mutant in mutants if mutant.package in ("data", "loss", "packing")]
    assert len({mutant.name for mutant in some}) == len(some)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        kinds.setdefault(mutant.kind, []).append(mutant)
    for alike in kinds.values():
        for mutant in alike[:: len(alike) // 4]:
            original = ast.parse(mutant.module.text)
            assert ast.dump(ast.parse(mutant.source)) != ast.dump(original), mutant.name


VERDICTS = ("verify", "crash", "survived", "no effect", "rounding", "not reached")


def lines_of(*verdicts: str) -> list[dict[str, Any]]:
    return [
        {"name": f"m{number}", "file": "a.py", "module": "1", "verdict": verdict, "where": "ledger"}
        for number, verdict in enumerate(verdicts)
    ]


@pytest.mark.parametrize(
    ("command", "code", "output", "verdict"),
    [
        ("rl", 0, "", None),
        ("rl", 1, "error: 64 tokens are unaccounted for; see `pellucid ledger run`", "ledger"),
        ("rl", 1, "error: the trainer is gone", "crash"),
        ("verify", 1, "oracle: the first stage that differs: loss", "verify"),
        ("verify", 1, "Traceback (most recent call last):", "crash"),
        ("rl", None, "", "hang"),
    ],
)
def test_a_fault_that_a_command_names_is_no_crash(
    command: str, code: int | None, output: str, verdict: str | None
) -> None:
    assert verdict_of(command, Answer(code, output, 1.0)) == verdict


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a command may take its time")
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import time; time.sleep(600)", None),
        ("import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass", 0),
    ],
)
def test_a_command_hangs_if_it_computes_nothing(
    program: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one takes longer than the first may be idle."""
    monkeypatch.setattr(mutate, "IDLE_S", 1.5)
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, text=True) as command:
        try:
            assert wait_unless_idle(command, tmp_path, 300.0) == code
        finally:
            command.kill()


def test_rates_are_about_mutants_that_have_an_effect_or_that_a_command_names() -> None:
    printed = report(lines_of(*VERDICTS)).splitlines()
    assert "5 mutants tried: 1 without an effect, 1 by rounding alone" in printed
    assert "caught by the commands: 2 of 3 (66.7%; 95% interval 20.8% to 93.9%)" in printed
    assert "of those that do not crash, hang or fail to import, named: 1 of 2 " in report(lines_of(*VERDICTS))
    assert "survived: m2 (None: ledger)" in printed
    assert printed[-2:] == ["1 mutants on lines that no command reaches:", "     1 a.py"]


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)],
)
def test_the_interval_is_wilsons(hits: int, total: int, low: float, high: float) -> None:
    assert wilson(hits, total) == pytest.approx((low, high), abs=5e-5)  # figures of four digits


def test_a_sample_has_the_proportions_of_the_packages_and_grows_at_its_end() -> None:
    mutants = [
        mutant
        for file, source in (("a/x.py", "y = 1 + 2\n" * 40), ("b/x.py", "y = 1 + 2\n" * 10))
        for mutant in mutants_of(file, source)
    ]
    small, large = stratified(mutants, 10, seed=0), stratified(mutants, 50, seed=0)
    assert Counter(mutant.package for mutant in small) == {"a": 8, "b": 2}
    assert Counter(mutant.package for mutant in large) == {"a": 40, "b": 10}
    assert large[:10] == small
    assert stratified(mutants, 10, seed=1) != small


def test_results_of_a_module_that_has_changed_since_do_not_count(tmp_path: Path) -> None:
    old, new = (next(mutants_of("a/x.py", source)) for source in ("y = a + b", "y = a + b  # now"))
    assert old.name == new.name
    path = tmp_path / "found.jsonl"
    path.write_text(json.dumps({"name": old.name, "module": old.module.digest, "verdict": "verify"}) + "\n")
    assert [line["verdict"] for line in read(path, [old])] == ["verify"]
    assert read(path, [new]) == []


def a_run(
    folder: Path,
    *,
    weight: float = 1.0,
    logprob: float = -4.5,
    place: int = 0,
    padding: int = 0,
    trained: int = 8,
    sent: int = 8,
    wait_s: float = 0.1,
    text: str = "ba",
) -> Facts:
    """What is known of a run of one step with one sequence."""
    files = {
        "token_exports/step_0/rank_0.jsonl": {"micro_step": place, "token_ids": [7], "logprobs": [logprob]},
        "rollouts/step_0/train_rollouts.jsonl": {
            "rollout_id": "g0-r0",
            "reward": 0.5,
            "trajectory": [{"text": text, "wait_s": wait_s}],
        },
        "ledger/orchestrator.jsonl": {"env": "e", "counts": {"sent": sent}},
        "ledger/trainer.jsonl": {"step": 0, "env": "e", "counts": {"trained": 8, "computed": 8 + place}},
    }
    totals = {"total/tokens": 8 + padding, "total/local/tokens": 8 + padding, "total/trained_tokens": trained}
    ledger = [{"env": "e", "counts": {"trained": trained, "computed": 8}}]
    ledger += [{"env": "", "counts": {"computed": padding, "padding": padding}}] if padding else []
    files["checkpoints/step_1/progress.json"] = {"totals": totals, "ledger": ledger, "files": [padding]}
    for name, record in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
    (folder / "weights" / "step_1").mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full(4, weight, np.float32)}, folder / "weights" / "step_1" / "model.safetensors")
    return facts_of(folder)


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    save_torch_file({"w": torch.full((2,), 1.5, dtype=torch.bfloat16)}, path)
    tensor = facts_of(tmp_path)["tensor model/model.safetensors w"]
    assert isinstance(tensor, np.ndarray) and tensor.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("same", "")),
        ({"place": 3}, ("same", "")),
        ({"padding": 3}, ("same", "")),
        ({"trained": 7}, ("differs", "checkpoint checkpoints/step_1/progress.json")),
        ({"wait_s": 0.2}, ("same", "")),
        ({"text": "ab"}, ("differs", "rollouts step_0 0 trajectory")),
        ({"logprob": -4.500001}, ("rounding", "tokens step_0 0 logprobs")),
        ({"logprob": -4.501}, ("differs", "tokens step_0 0 logprobs")),
        ({"weight": 1.00001}, ("rounding", "tensor weights/step_1/model.safetensors w")),
        ({"weight": 1.001}, ("differs", "tensor weights/step_1/model.safetensors w")),
        ({"sent": 9}, ("differs", "ledger")),
    ],
)
def test_runs_are_compared_by_what_they_left(
    tmp_path: Path, changed: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert difference(a_run(tmp_path), a_run(tmp_path, **changed)) == expected


def test_a_record_that_is_missing_is_a_difference(tmp_path: Path) -> None:
    facts = a_run(tmp_path)
    (tmp_path / "rollouts" / "step_0" / "train_rollouts.jsonl").unlink()
    assert difference(facts, facts_of(tmp_path)) == ("differs", "rollouts step_0 0 reward")


def test_every_executed_line_is_recorded_once(tmp_path: Path) -> None:
    module = tmp_path / "traced" / "module.py"
    module.parent.mkdir()
    module.write_text("for number in (1, 2):\n    if number == 3:\n        number = 4\n")
    before, before_threads = sys.gettrace(), threading.gettrace()
    record_lines(str(module.parent), tmp_path / "lines")
    try:
        runpy.run_path(str(module))
    finally:
        sys.settrace(before)
        threading.settrace(before_threads)
    assert (tmp_path / "lines").read_text().splitlines() == [f"{module}:1", f"{module}:2"]
