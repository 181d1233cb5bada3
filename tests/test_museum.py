"""The museum is about today's source: patches apply, and its page tells what the exhibits say.

`make museum` runs the commands; here only what takes no time is held.
"""

import ast
from dataclasses import replace

import pytest

import museum

EXHIBITS = museum.read_exhibits()


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
        assert exhibit.is_caught(1, printed[exhibit.name]), exhibit.name


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


def test_an_excerpt_is_what_the_check_said_and_the_last_line() -> None:
    exhibit = replace(EXHIBITS[0], check="packing", output="packing: it depends")
    twice = "packing: it\ndepends\n\npacking: it\ndepends\n\n"
    output = (
        f" check  measured\n packing  ok\n\nranks: no\n\n{twice}3 of 5 findings are within their limits\n=="
    )
    assert museum.excerpt(exhibit, output) == "\n".join(
        ["…", "packing: it", "depends", "3 of 5 findings are within their limits"]
    )
