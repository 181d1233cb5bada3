"""The museum is about today's source: patches apply, and its page tells what the exhibits say.

`make museum` runs the commands; here only what takes no time is held.
"""

import ast
import re
from dataclasses import replace

import pytest

import museum

EXHIBITS = museum.read_exhibits()
SPEAKING = ("checks", "ledger", "launch", "orchestrator", "trainer")
"""Packages whose texts the commands print."""

MIN_FIXED = 18
"""Characters of a sentence; shorter ones stand anywhere."""


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_a_patch_applies_and_changes_what_the_code_does(exhibit: museum.Exhibit) -> None:
    for file, text in museum.patched(exhibit).items():
        source = (museum.PACKAGE / file).read_text()
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))


def test_a_patch_that_no_longer_applies_says_so() -> None:
    exhibit = replace(EXHIBITS[0], patches=(("trainer/loop.py", "result.loss.forward()", ""),))
    with pytest.raises(
        museum.PatchError, match=r"(?s)does not apply: trainer/loop.py has 0 times.result.loss"
    ):
        museum.patched(exhibit)


def test_the_page_has_every_exhibit_and_output_that_names_its_check() -> None:
    page = museum.PAGE.read_text()
    printed = museum.printed_on(page)
    assert sorted(printed) == [exhibit.name for exhibit in EXHIBITS]
    assert page == museum.page_of(EXHIBITS, printed)
    for exhibit in EXHIBITS:
        assert exhibit.is_named(printed[exhibit.name]), exhibit.name


@pytest.fixture(scope="module")
def sentences() -> list[list[str]]:
    """The fixed words of every text in the package, in parts around what is filled in."""
    found = []
    for path in (path for name in SPEAKING for path in (museum.PACKAGE / name).rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append([str(each.value) for each in node.values if isinstance(each, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                found.append([node.value])
    parts = [[" ".join(part.split()) for part in each if part.strip()] for each in found]
    return [each for each in parts if sum(map(len, each)) >= MIN_FIXED]


def said_today(exhibit: museum.Exhibit, text: str, sentences: list[list[str]]) -> bool:
    """Whether a whole sentence of today's source stands where the exhibit's pattern matches."""
    text = " ".join(text.replace("│", " ").split())
    match = re.search(exhibit.output, text)
    assert match is not None, exhibit.name
    for parts in sentences:
        found = re.search(".*?".join(map(re.escape, parts)), text) if parts[0] in text else None
        if found and found.start() < match.end() and match.start() < found.end():
            return True
    return False


def test_the_page_tells_what_commands_print_today(sentences) -> None:
    """An exhibit that fails here was regenerated last before a sentence changed: `museum.py NAME --write`."""
    printed = museum.printed_on(museum.PAGE.read_text())
    stale = [each.name for each in EXHIBITS if not said_today(each, printed[each.name], sentences)]
    assert stale == []


def test_a_sentence_that_changed_is_noticed(sentences) -> None:
    exhibit = next(each for each in EXHIBITS if each.name == "padding_trained")
    text = "packing: padding has a loss: its tokens count as trainable. Look at the loss mask"
    assert said_today(exhibit, f"{text} of what fills it up", sentences)
    assert not said_today(exhibit, f"{text} of what fills a micro batch", sentences)


def test_a_bug_is_caught_by_a_failure_that_is_named_and_by_nothing_else() -> None:
    exhibit = replace(EXHIBITS[0], output="oracle: the first stage that differs: masks")
    output = "47 of 48\n\noracle: the first stage\nthat differs: masks, step 1"
    assert exhibit.is_caught(1, output)
    assert not exhibit.is_caught(0, output)
    assert not exhibit.is_caught(1, output.replace("masks", "loss"))


def test_copies_and_lines_of_commands(tmp_path) -> None:
    exhibit = next(each for each in EXHIBITS if each.name == "twice_the_loss")
    path = museum.plant(exhibit, tmp_path)
    assert "(2 * result.loss).backward()" in (path / "pellucid" / "trainer" / "loop.py").read_text()
    assert museum.arguments_of("pellucid ledger run")[1:] == ["-m", "pellucid.cli", "ledger", "run"]
    assert museum.arguments_of("torchrun -m pellucid.cli verify")[1:] == [
        *("-m", "torch.distributed.run", "-m", "pellucid.cli", "verify", "--trainer.threads", "1")
    ]


def test_an_excerpt_is_what_the_check_said_and_the_error() -> None:
    exhibit = replace(EXHIBITS[0], check="packing", output="packing: it depends")
    twice = "packing: it\ndepends\n\npacking: it\ndepends\n\n"
    output = f" check  measured\n packing  ok\n\nranks: no\n\n{twice}error: it\n3 of 5 findings agree\n"
    assert museum.excerpt(exhibit, output) == "\n".join(["…", "packing: it", "depends", "error: it"])
