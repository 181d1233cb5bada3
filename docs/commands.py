"""The command line as a page: every command, its arguments and flags, from the parsers that read them.

    python docs/commands.py > docs/commands.md

Commands that take a run's configuration have hundreds of flags; those are the keys of docs/configuration.md,
and only what a command has beyond them is listed here.
"""

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator

from pellucid.cli import COMMANDS, Command
from pellucid.config.base import Section
from pellucid.config.commands import PARTS, RLConfig, RunConfig, SFTConfig
from pellucid.config.parse import parser_of

_INTRODUCTION = """\
# Command line

    pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]

Files are merged in order, and flags win over them. Keys are the same in both: `[trainer.optim] lr = 3e-4`
is `--trainer.optim.lr 3e-4`. Lists and tables are JSON, `null` unsets a value, and a value that starts with
`-` or `@` is written `--section.key=VALUE`. A bare flag on an optional section switches it on:
`--trainer.experimental.token-export`. Every command takes `--help`, and `--dry-run`, which runs nothing. It
prints the configuration that would run, with each default that follows from other keys or from this machine
(threads, rollouts in flight, names); only a port of 0 stays, since a free one is chosen at the start. Then it
imports and checks what it can: environments are made, with their first example; advantages, filters and
losses are imported; the model's folder, data files, keys, ports, trackers and the run folder are looked at.

| exit code | meaning |
|---|---|
| 0 | it is done; of a check: everything holds |
| 1 | it failed; of a check: something does not hold |
| 2 | a wrong command, flag or setting |
| 74 | the disk is full |
| 128 + signal | stopped by Ctrl-C (130) and its like |

`PELLUCID_LOG_LEVEL` (`DEBUG`, `INFO`, `WARNING`, `ERROR`) sets what is logged.
"""


def reference() -> str:
    """Returns the whole page, in Markdown."""
    lines = [_INTRODUCTION, "| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#pellucid-{name}) | {command.help} |" for name, command in COMMANDS.items()]
    for name, command in COMMANDS.items():
        lines += ["", f"## pellucid {name}", "", *_command(name, command)]
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: Command) -> Iterator[str]:
    actions = _actions(command.config)
    if issubclass(command.config, RunConfig):
        usage = "[@ FILE.toml ...] [--section.key value ...]"
    else:
        usage = " ".join([*(_argument(a) for a in actions if not a.option_strings), "[FLAG ...]"])
        if "others" in command.config.model_fields:
            usage = usage.replace("[PATH]", "[PATH ...]")
    yield f"    pellucid {name} {usage}"
    yield ""
    yield f"{command.help[0].upper()}{command.help[1:]}."
    if issubclass(command.config, RunConfig):
        yield from ["", _configuration(actions)]
        if section := PARTS.get(command.config):
            yield f"`--{section}.KEY` may be written `--KEY`."
        actions = [action for action in actions if action.dest not in _DOCUMENTED]
    if actions:
        yield from ["", "| flag | default | meaning |", "|---|---|---|", *map(_row, actions)]


def _argument(action: Action) -> str:
    return f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)


def _actions(kind: type[Section]) -> list[Action]:
    """Arguments and flags; not those that all commands have, nor whole sections as JSON."""
    parser = parser_of(kind, prog="pellucid")
    common = {"help", "dry_run", "unknown"}
    hidden = {"JSON", SUPPRESS}
    return [a for a in parser._actions if a.dest not in common and not hidden & {a.metavar, a.help}]


_DOCUMENTED = {action.dest for kind in (RLConfig, SFTConfig) for action in _actions(kind)}
"""The keys of docs/configuration.md."""


def _configuration(actions: list[Action]) -> str:
    """The keys and sections of a run's configuration that a command reads; it skips the rest of the file."""
    paths = [action.dest.split(".") for action in actions if action.dest in _DOCUMENTED]
    keys = ", ".join(f"`{path[0]}`" for path in paths if len(path) == 1)
    sections = ", ".join(dict.fromkeys(f"`[{path[0]}]`" for path in paths if len(path) > 1))
    return f"[Configuration](configuration.md): {keys}; {sections}."


_VALUES = {
    "int": "N",
    "float": "X",
    "str": "TEXT",
    "Path": "PATH",
    "tuple[str,...]": "TEXT",
    "dict[str,Any]": "JSON",
}
_DEFAULTS = {"null": "not set", "()": "none", "True": "on", "False": "off"}


def _row(action: Action) -> str:
    """Returns a flag, its default and its docstring; the parser's help ends with the default."""
    found = re.fullmatch(r"(.*?)(?: \((required|default: (.*))\))?", action.help or "", re.DOTALL)
    assert found is not None  # every part of it may be empty
    meaning, tail, default = found.groups()
    shown = "required" if tail is None or default is None else _DEFAULTS.get(default, f"`{default}`")
    text = " ".join(meaning.split()).replace("|", "\\|")
    return f"| {_names(action)} | {shown} | {text} |"


def _names(action: Action) -> str:
    """`--json`, `--no-json` as they stand, others with what they take: `--output PATH`, `-o PATH`."""
    if not action.option_strings:
        return f"`{action.metavar}`"
    value = "" if action.nargs == 0 else f" {_VALUES.get(str(action.metavar), action.metavar)}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


if __name__ == "__main__":
    print(reference(), end="")
