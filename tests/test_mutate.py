"""The mutants that `mutate.py` plants: one change each, at every place that computes, and nowhere else."""

import ast
from pathlib import Path

import pytest

from mutate import ROOMS, all_mutants, mutants_of, report

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
        ("x = a[0]", {"shift: a[0] -> a[1]", "scale: 0 -> 1"}),
        ("x = True", set()),
        ("raise ValueError(a + b)", set()),
        ("logger.info('%s', a + b)", set()),
        ("def f(a: g(1, 2)) -> g(1, 2):\n    'A docstring.'", set()),
    ],
)
def test_a_mutant_has_one_change(source: str, mutants: set[str]) -> None:
    found = list(mutants_of("file.py", source))
    assert {mutant.name.partition(" ")[2] for mutant in found} == mutants
    for mutant in found:
        assert mutant.source == source.replace(mutant.before, mutant.after)


def test_every_room_exists_and_has_mutants_that_are_python() -> None:
    mutants = all_mutants(PACKAGE)
    assert {mutant.file for mutant in mutants} == set(ROOMS)
    for mutant in mutants[::50]:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse((PACKAGE / mutant.file).read_text()))


def test_mutants_without_an_effect_do_not_count() -> None:
    verdicts = ["verify", "replay", "survived", "no effect"]
    lines = [{"name": f"m{number}", "verdict": verdict} for number, verdict in enumerate(verdicts)]
    assert report(lines).splitlines()[:2] == [
        "4 mutants, 1 without an effect",
        "caught by the commands: 2 of 3 (66.7%)",
    ]
    assert report(lines).splitlines()[-1] == "survives: m2"
