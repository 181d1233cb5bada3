"""The mutants that `mutate.py` plants: one change each, at every place that computes, and nowhere else."""

import ast
from pathlib import Path

import pytest

from mutants import ROOMS, Mutant, all_mutants, mutants_of
from mutate import report

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
    assert {mutant.file for mutant in mutants} == set(ROOMS)
    some = [mutant for mutant in mutants if mutant.package in ("data", "loss", "packing")]
    assert len({mutant.name for mutant in some}) == len(some)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        kinds.setdefault(mutant.kind, []).append(mutant)
    for alike in kinds.values():
        for mutant in alike[:: len(alike) // 4]:
            original = ast.parse(mutant.module.text)
            assert ast.dump(ast.parse(mutant.source)) != ast.dump(original), mutant.name


def test_mutants_without_an_effect_do_not_count() -> None:
    verdicts = ["verify", "replay", "survived", "no effect"]
    lines = [{"name": f"m{number}", "verdict": verdict} for number, verdict in enumerate(verdicts)]
    assert report(lines).splitlines()[:2] == [
        "4 mutants, 1 without an effect",
        "caught by the commands: 2 of 3 (66.7%)",
    ]
    assert report(lines).splitlines()[-1] == "survives: m2"
