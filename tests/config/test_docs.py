"""What the command line promises about every key: documented, shown by --help, and possible to save."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from docs import commands
from pellucid.cli import COMMANDS
from pellucid.config.base import TAG, Section
from pellucid.config.explain import reference
from pellucid.config.parse import parse


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def fields_of(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a section and of the sections inside it, by `Class.name`."""
    for name, field in section.model_fields.items():
        yield f"{section.__name__}.{name}", field
        for inner in sections_in(field.annotation):
            yield from fields_of(inner)


PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
FIELDS = dict(entry for command in COMMANDS.values() for entry in fields_of(command.config))


def allows_none(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def flags_of(section: type[Section], prefix: str = "--") -> Iterator[str]:
    for name, field in section.model_fields.items():
        flag = prefix + (field.alias or name).replace("_", "-")
        yield flag
        if get_origin(field.annotation) is not tuple:
            for inner in sections_in(field.annotation):
                yield from flags_of(inner, f"{flag}.")


@pytest.mark.parametrize("name", FIELDS)
def test_every_key_has_a_docstring(name: str):
    assert FIELDS[name].description


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if allows_none(field)])
def test_a_key_that_may_be_none_is_none_by_default(name: str):
    assert FIELDS[name].default is None, "TOML has no null: a None that is not the default cannot be saved"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.discriminator])
def test_a_tagged_union_has_a_default_and_help_describes_it(name: str):
    field = FIELDS[name]
    variants = list(sections_in(field.annotation))
    assert field.discriminator == TAG
    assert type(field.default) is variants[-1], "--help describes the last variant's tag"


@pytest.mark.parametrize("command", ["rl", "sft", "trainer", "orchestrator", "inference"])
def test_help_shows_every_flag(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(COMMANDS[command].config, ["--help"], prog=f"pellucid {command}")
    shown = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(flags_of(COMMANDS[command].config)) - shown == set()
    assert "--dry-run" in shown


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference(), "run `python -m pellucid.config.explain > docs/configuration.md`"


def test_the_page_of_commands_is_up_to_date() -> None:
    assert commands.reference() == PAGE, "run `python docs/commands.py > docs/commands.md`"


@pytest.mark.parametrize("command", ["view", "ledger", "replay", "env", "keys"])
def test_the_page_of_commands_has_every_flag(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(COMMANDS[command].config, ["--help"], prog=f"pellucid {command}")
    shown = {word for word in capsys.readouterr().out.replace(",", " ").split() if word.startswith("--")}
    (section,) = re.findall(rf"^## pellucid {command}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    listed = set(re.findall(r"`(--[\w-]+)", section))
    assert listed == {word.strip("[]") for word in shown} - {"--help", "--dry-run", "--section.key=VALUE."}
