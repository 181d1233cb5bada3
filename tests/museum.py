"""The museum: bugs that bit users of RL trainers, planted in a copy of the package, each caught by a command.

    python tests/museum.py               every exhibit, after its commands on an unpatched copy (make museum)
    python tests/museum.py stale_prefix  those whose name contains this (make museum ONLY=stale_prefix)
    python tests/museum.py --write       and writes docs/museum.md with what the commands printed

An exhibit is a file in `tests/museum/`: what the bug is, the commands that catch it, the check that names it,
a regular expression of the output, the exit code (an alarm leaves it at 0), and the patch as exact
replacements. The shipped code has no switch for any of them. A patch that no longer applies is an error that
says so.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.model.tiny import make_tiny_model, make_tiny_moe_model

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pellucid"
PAGE = ROOT / "docs" / "museum.md"
TIMEOUT_S = 600
WIDTH = 100
SHOWN_PARAGRAPHS, MAX_LINES = 2, 12
_COUNTS = re.compile(r"\d+ of \d+ findings")
"""A line with numbers that change with every check that a command gains."""

INTRODUCTION = """\
# The museum of bugs

```console
$ make museum                        # plants every bug of this page in a copy of the package, one at a time
$ make museum ONLY=stale_prefix      # those whose name contains this
```

Bugs of this kind have cost users of RL trainers runs and weeks: rewards still rise, only less, and nothing
crashes. Each is planted here in a copy of pellucid, and a command that you have catches it:
[`verify`](verify.md) before a run, an [alarm](alarms.md) during one, or [`ledger`](ledger.md) and
[`replay`](replay.md) on its folder. Below stand what you would have seen without the command, and what the
command prints. The patches are in `tests/museum/`, a file each.
"""

Replacement = tuple[str, str, str]
"""File in the package, old text, new text."""


class PatchError(Exception):
    """A patch does not apply to today's source."""


@dataclass(frozen=True)
class Exhibit:
    name: str
    title: str
    story: str
    """The bug, and what its users see."""

    commands: tuple[str, ...]
    """Shell lines; the last one catches the bug, and those before it succeed."""

    check: str
    """The check that names it."""

    output: str
    """Regular expression; the output is searched for it with its white space made single."""

    patches: tuple[Replacement, ...]
    exit_code: int = 1
    """Of the command that catches it."""

    @classmethod
    def read(cls, path: Path) -> "Exhibit":
        table = tomllib.loads(path.read_text())
        return cls(
            path.stem,
            table["title"],
            " ".join(table["story"].split()),
            tuple(table["commands"]),
            table["check"],
            table["output"],
            tuple((each["file"], each["old"], each["new"]) for each in table["patch"]),
            table.get("exit_code", 1),
        )

    def is_named(self, output: str) -> bool:
        return re.search(self.output, " ".join(output.split())) is not None

    def is_caught(self, exit_code: int, output: str) -> bool:
        return exit_code == self.exit_code and self.is_named(output)


def read_exhibits() -> list[Exhibit]:
    return [Exhibit.read(path) for path in sorted((ROOT / "tests" / "museum").glob("*.toml"))]


def patched(exhibit: Exhibit, package: Path = PACKAGE) -> dict[str, str]:
    """The new text of every file that the exhibit changes."""
    texts: dict[str, str] = {}
    for file, old, new in exhibit.patches:
        text = texts.get(file) or (package / file).read_text()
        if text.count(old) != 1:
            raise PatchError(
                f"tests/museum/{exhibit.name}.toml does not apply: {file} has {text.count(old)} times\n"
                f"{old}\nFollow the source, so that it plants the same bug again"
            )
        texts[file] = text.replace(old, new)
    return texts


def plant(exhibit: Exhibit | None, folder: Path) -> Path:
    """Copies the package, with the bug or without any; returns what PYTHONPATH has to be."""
    path = folder / "package"
    shutil.copytree(PACKAGE, path / "pellucid", ignore=shutil.ignore_patterns("__pycache__"))
    if exhibit is not None:
        for file, text in patched(exhibit).items():
            (path / "pellucid" / file).write_text(text)
    return path


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    output: str
    seconds: float


def run_commands(commands: Sequence[str], python_path: Path, folder: Path) -> Outcome:
    """Runs the lines until one fails; the outcome is that of the last one that ran."""
    prepare(folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(python_path),
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    started = time.monotonic()
    outcome = Outcome(0, "", 0.0)
    for number, command in enumerate(commands, 1):
        done = subprocess.run(
            arguments_of(command),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        outcome = Outcome(done.returncode, done.stdout, time.monotonic() - started)
        if done.returncode and number < len(commands):
            return Outcome(
                -1, f"{command} failed, which only sets the scene:\n{done.stdout}", outcome.seconds
            )
    return outcome


def arguments_of(command: str) -> list[str]:
    program, *arguments = shlex.split(command)
    modules = {"pellucid": "pellucid.cli", "torchrun": "torch.distributed.run"}
    threads = ["--trainer.threads", "1"] if "verify" in arguments else []  # cores may be busy with others
    return [sys.executable, "-m", modules[program], *arguments, *threads]


RUN = """\
output_dir = "run"
max_steps = 4
seq_len = 256
model.name = "tiny"

[orchestrator]
batch_size = 16
rollouts_per_example = 4
sampling.max_tokens = 8
env = [{ id = "reverse-text" }]

[trainer]
threads = 1
experimental.token_export = {}
"""
"""`rl.toml` of the commands that train."""


def prepare(folder: Path) -> None:
    """Makes the models and settings that commands name."""
    (folder / "rl.toml").write_text(RUN)
    make_tiny_model(folder / "tiny", num_layers=2, hidden_size=64)
    make_tiny_moe_model(folder / "experts")


def excerpt(exhibit: Exhibit, output: str) -> str:
    """What the catching command said: the first paragraphs of the named check, and the error at the end."""
    lines = [line.rstrip() for line in output.splitlines()]
    last = [line for line in lines if line.startswith("error: ")][-1:]
    found: list[list[str]] = []
    for part in _paragraphs([line for line in lines if line not in last and not _COUNTS.search(line)]):
        is_named = exhibit.is_named(" ".join(part))
        if (is_named or part[0].startswith(f"{exhibit.check}: ")) and part not in found:
            found.append(part)
    shown = [line for part in found[:SHOWN_PARAGRAPHS] for line in _shortened(part, exhibit)]
    return "\n".join(["…", *(part for line in [*shown, *last] for part in textwrap.wrap(line, WIDTH))])


def _shortened(lines: list[str], exhibit: Exhibit) -> list[str]:
    """Cuts a long paragraph, such as the summary of a run, to the whole lines that name the check."""
    if len(lines) <= MAX_LINES:
        return lines
    kept: list[str] = []
    is_kept = False
    for line in lines:
        is_kept = exhibit.check in line or (is_kept and re.match(r"│ {8}", line) is not None)
        kept += [line] if is_kept else []
    return kept


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    """Runs of lines without an empty one between."""
    current: list[str] = []
    for line in [*lines, ""]:
        if line:
            current.append(line)
        elif current:
            yield current
            current = []


def section(exhibit: Exhibit, printed: str) -> str:
    commands = "\n".join(f"$ {command}" for command in exhibit.commands)
    text = textwrap.fill(f"{exhibit.story} Caught by `{exhibit.check}` (`{exhibit.name}`).", 120)
    return f"## {exhibit.title}\n\n{text}\n\n```console\n{commands}\n{printed}\n```\n"


def printed_on(page: str) -> dict[str, str]:
    """What the commands printed, by the name of the exhibit, as a page has it."""
    found = re.findall(r"\(`(\w+)`\)\.\n\n```console\n(?:\$ [^\n]*\n)+(.*?)\n```\n", page, re.DOTALL)
    return dict(found)


def page_of(exhibits: Sequence[Exhibit], printed: dict[str, str]) -> str:
    """The page, with those exhibits of which it is known what the command prints."""
    known = [each for each in exhibits if each.name in printed]
    return "\n".join([INTRODUCTION, *(section(each, printed[each.name]) for each in known)])


def show(exhibits: Sequence[Exhibit], *, write: bool) -> int:
    """Runs all; 1 if one is not caught, or an unpatched copy fails."""
    failed = []
    printed = printed_on(PAGE.read_text()) if PAGE.exists() else {}
    width = max(len(each.name) for each in exhibits)
    print(f"{'exhibit':<{width}}  {'caught by':<11}  {'seconds':>7}  command", flush=True)
    for commands in dict.fromkeys(each.commands for each in exhibits):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            outcome = run_commands(commands, plant(None, folder), folder)
        named = [
            each.name for each in exhibits if each.commands == commands and each.is_named(outcome.output)
        ]
        verdict = "-" if outcome.exit_code == 0 and not named else "FAILS"
        print(f"{'(unpatched)':<{width}}  {verdict:<11}  {outcome.seconds:7.1f}  {commands[-1]}", flush=True)
        if verdict != "-":
            failed.append(f"the unpatched copy fails {' '.join(named)}:\n{outcome.output}")
    for exhibit in exhibits:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            outcome = run_commands(exhibit.commands, plant(exhibit, folder), folder)
        is_caught = exhibit.is_caught(outcome.exit_code, outcome.output)
        verdict = exhibit.check if is_caught else "NOT CAUGHT"
        line = f"{exhibit.name:<{width}}  {verdict:<11}  {outcome.seconds:7.1f}  {exhibit.commands[-1]}"
        print(line, flush=True)
        if is_caught:
            printed[exhibit.name] = excerpt(exhibit, outcome.output)
        else:
            failed.append(f"{exhibit.name}, exit code {outcome.exit_code}:\n{outcome.output}")
    for each in failed:
        print(f"\n{each}")
    print(f"{len(exhibits)} exhibits, {len(failed)} failures")
    if write:
        PAGE.write_text(page_of(read_exhibits(), printed))
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("only", nargs="*", help="a part of the names of the exhibits to show")
    parser.add_argument("--write", action="store_true", help="write docs/museum.md")
    options = parser.parse_args(arguments)
    exhibits = [
        each
        for each in read_exhibits()
        if not options.only or any(only in each.name for only in options.only)
    ]
    if not exhibits:
        parser.error(f"no exhibit is called {' or '.join(options.only)}")
    return show(exhibits, write=options.write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
