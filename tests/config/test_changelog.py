"""Every configuration key has stood in CHANGELOG.md, so that a user can find out when it came and why."""

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import CliPositionalArg

from pellucid.cli import COMMANDS
from pellucid.config.base import dotted_keys

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


def names_in(text: str) -> set[str]:
    """Keys and sections that a changelog names, in any of these forms:

    - `trainer.optim.lr`, `trainer.loss.type = "gspo"`, `[[orchestrator.filter]]`
    - `--trainer.optim.lr`, `-o, --output`
    - `[trainer.optim]`: `lr`, `betas`
    """
    found: set[str] = set()
    lists = r"^ *- `\[([\w.]+)\]`: ((?:.|\n(?! *- ))*)"
    for section, keys in re.findall(lists, text, re.MULTILINE):
        found |= {f"{section}.{key}" for key in re.findall(r"`(\w+)`", keys)} | {section}
    rest = re.sub(lists, "", text, flags=re.MULTILINE)
    found |= {name.replace("-", "_") for name in re.findall(r"--([a-z][\w.-]*\w)", rest)}
    found |= set(re.findall(r"`\[*([a-z][\w.]*)", rest))
    return found | {name[: dot.start()] for name in found for dot in re.finditer(r"\.", name)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("- `a.b.c = 1` is new", {"a.b.c", "a.b", "a"}),
        ("- `[[a.b]]`: filters, and `--c.d-e`", {"a.b", "a", "c.d_e", "c"}),
        ("- keys:\n  - `[a.b]`: `c`,\n    `d`\n- `e`", {"a.b.c", "a.b.d", "a.b", "a", "e"}),
    ],
)
def test_names(text, names) -> None:
    assert names_in(text) == names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_stood_in_the_changelog(command: str) -> None:
    known, config = names_in(CHANGELOG), COMMANDS[command].config
    known |= {name for name, field in config.model_fields.items() if _is_positional(field)}
    keys = dict.fromkeys(key.replace("[]", "") for key in dotted_keys(config))
    missing = [key for key in keys if key not in known]
    assert not missing, (
        f"CHANGELOG.md never names these keys of `pellucid {command}`: {', '.join(missing)}; say under "
        "Unreleased what they are for, with each as `section.key` or --section.key"
    )


def _is_positional(field: FieldInfo) -> bool:
    """`pellucid ledger RUN`: nobody writes its name."""
    (marker,) = CliPositionalArg.__metadata__
    return marker in field.metadata
