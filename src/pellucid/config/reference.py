"""Writes the configuration page: every key of every command, with its default and its docstring.

python -m pellucid.config.reference > docs/configuration.md
"""

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pellucid.config.commands import RLConfig, SFTConfig

_INTRODUCTION = """\
# Configuration

Every key of `pellucid rl` and `pellucid sft`; `pellucid trainer`, `pellucid orchestrator` and
`pellucid inference` read their own sections of the same tree. Write keys in a TOML file (`@ file.toml`)
or as flags (`--trainer.optim.lr 3e-4`); flags win. `--dry-run` prints the configuration as resolved.
"""


def reference() -> str:
    """Writes the whole page, in Markdown."""
    parts = {"Top level of `pellucid rl`": _rows(RLConfig), "Top level of `pellucid sft`": _rows(SFTConfig)}
    for kind in (RLConfig, SFTConfig):
        parts |= dict(_sections(kind, ""))
    lines = [_INTRODUCTION]
    for title, rows in parts.items():
        header = ["| key | default | meaning |", "|---|---|---|"] if rows else ["It has no keys."]
        lines += [f"## {title}", "", *header, *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(kind: type[BaseModel], path: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (title, rows) of every section below `kind`; each variant of a tagged union is a section."""
    for name, field in kind.model_fields.items():
        models = list(_models(field.annotation))
        for model in models:
            variant = f" with `type = {_literal(model)}`" if len(models) > 1 else ""
            yield f"`[{path}{name}]`{variant}", _rows(model)
            yield from _sections(model, f"{path}{name}.")


def _rows(kind: type[BaseModel]) -> list[str]:
    return [
        f"| `{name}` | {_default(field)} | {_prose(field.description)} |"
        for name, field in kind.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    ]


def _literal(model: type[BaseModel]) -> str:
    """Writes the tag of a variant as TOML does."""
    return json.dumps(get_args(model.model_fields["type"].annotation)[0])


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "not set"
    if isinstance(field.default, BaseModel):
        return f"`type = {_literal(type(field.default))}`"
    return f"`{json.dumps(field.default, default=str)}`"


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
