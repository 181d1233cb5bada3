"""What pages name exists: commands and flags are taken as shown; keys are keys, metrics are metrics."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pellucid.cli import COMMANDS
from pellucid.config.commands import InferenceRunConfig, RunConfig, SFTConfig, TrainerRunConfig
from pellucid.config.parse import parse
from pellucid.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("skills/*/*.md")])
CURRENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
"""Without names of the past, and of modules."""
EXAMPLE = ROOT / "examples" / "reverse_text"
PROGRAMS = {"pellucid", "pellucid.cli", ".venv-vllm/bin/pellucid"}
WRONG = shlex.split("pellucid rl @ mine/rl.toml --orchestrator.batchsize 64 --dry-run")
"""The tutorial shows it with its error."""
SECTIONS = "(?:trainer|orchestrator|inference|transport|monitors|cluster)"
METRICS = (
    "(?:reward|entropy|mismatch_kl|is_masked|off_policy_level|errored_rollouts|time|throughput|memory|error)"
)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of what follows a prompt in its console blocks, without comments."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"^[\w-]*\$ +(.*)$", block.replace("\\\n", " "), re.MULTILINE):
            yield shlex.split(line, comments=True)


def understand(name: str, words: list[str]) -> None:
    """Parses, with an example in the place of a file that only a reader has, or that the line leaves out."""
    kind = COMMANDS[name].config
    example = str(EXAMPLE / ("sft.toml" if kind is SFTConfig else "rl.toml"))
    own = [
        example if before == "@" and not (ROOT / word).exists() else word
        for before, word in pairwise(["", *words])
    ]
    is_whole = kind in (TrainerRunConfig, InferenceRunConfig) and "--model.name" in own
    if issubclass(kind, RunConfig) and "@" not in own and not is_whole:
        own = ["@", example, *own]
    if "--trainer.join" in own:
        own += ["--model.lora.rank", "16"]  # as docs/adapters.md says of such a file
    parse(kind, own, prog=f"pellucid {name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken_as_they_are_shown(page) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(page):
        if words[0] == "make":
            assert words[1] in targets
        if words[0] == "git":
            continue
        program = next((at for at, word in enumerate(words) if word in PROGRAMS), None)
        if program is not None and "--help" not in words and words != WRONG:
            understand(words[program + 1], words[program + 2 :])


def test_a_wrong_command_is_noticed() -> None:
    with pytest.raises(ConfigError, match="--orchestrator.batchsize: unknown flag"):
        understand(WRONG[1], WRONG[2:])


def test_keys_are_keys() -> None:
    """Every dotted key in code style is one of the configuration, a section of it, or one of `render`."""
    flags = re.findall(r"`--(cluster\.[\w-]+)", (ROOT / "docs" / "commands.md").read_text())
    known = {flag.replace("-", "_") for flag in flags}
    for section in (ROOT / "docs" / "configuration.md").read_text().split("\n## ")[1:]:
        path = re.findall(r"^`\[([\w.]+)\]`", section)
        keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        known |= {*path, *(".".join([*path, key]) for key in keys)}
    for page in CURRENT:
        for key in re.findall(rf"`({SECTIONS}\.[a-z_.]+)`", page.read_text()):
            assert key in known, f"{page.name} names {key}"


def test_metrics_are_metrics() -> None:
    """Every metric in code style is in the tables of docs/monitor.md; ENV stands for any environment."""
    tables = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "monitor.md").read_text(), re.MULTILINE)
    patterns = [
        re.compile(re.sub(r"[A-Z]+", "[^/]+", name)) for row in tables for name in re.findall(r"`(.*?)`", row)
    ]
    for page in CURRENT:
        for name in re.findall(rf"`({METRICS}/[\w/@]+)`", page.read_text()):
            assert any(pattern.fullmatch(name) for pattern in patterns), f"{page.name} names {name}"
