"""The picture of who may import whom, asserted; and what commands do without, so that they start at once."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import pellucid

ROOT = Path(pellucid.__file__).parent

BASE = {"ending", "errors", "guard", "workers"}
"""What everything may import; it imports nothing of ours but `errors`."""

CORE = {"data", "config"}
MAY_IMPORT = {
    "data": set(),
    "config": set(),
    "ledger": CORE,
    "model": CORE,
    "packing": CORE,
    "loss": CORE,
    "metrics": CORE,
    "transport": CORE,
    "export": CORE,
    "checkpoint": CORE | {"ledger", "transport"},
    "inference": CORE | {"model", "transport", "ledger", "metrics"},
    "orchestrator": CORE | {"inference", "transport", "ledger", "metrics"},
    "trainer": CORE | {"model", "packing", "loss", "transport", "export", "checkpoint", "ledger", "metrics"},
    "integrations": CORE | {"loss", "export", "metrics"},
    "viewer": CORE | {"export", "ledger"},
}
TOP = {"cli", "launch", "checks"}
CLIENT_SIDE = {"client", "fake", "http", "pool", "servers"}
"""What of `inference` an orchestrator may see: never the engine."""


def _imports(path: Path) -> set[str]:
    """Modules of pellucid that a file imports, as dotted names below the package."""
    return _modules_of(ast.parse(path.read_text()), str(path))


def _modules_of(tree: ast.AST, where: str) -> set[str]:
    """Also `from pellucid import x`, and modules that are named by a string such as "pellucid.cli:run"."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            names = [f"pellucid.{alias.name}" for alias in node.names]
            found |= set(names) if node.module == "pellucid" else {node.module or ""}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"(pellucid\.(\w+)(?:\.\w+)*)(?::\w+)?", node.value)
            found |= {named[1]} if named and list(ROOT.glob(f"{named[2]}*")) else set()
    return {name.removeprefix("pellucid.") for name in found if name.startswith("pellucid.")}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from pellucid import trainer, errors", {"trainer", "errors"}),
        ("import pellucid.data as data", {"data"}),
        ("from pellucid.loss import dppo_loss", {"loss"}),
        ('load("pellucid.trainer.loop:train")', {"trainer.loop"}),
        ('import_module("pellucid.viewer")', {"viewer"}),
        ('logger = getLogger("pellucid.access")\nimport pellucid, torch', set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, modules: set[str]) -> None:
    assert _modules_of(ast.parse(source), "source") == modules


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_every_package_is_in_the_picture() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(MAY_IMPORT) | (TOP - {"cli"})


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_arrows_point_down_only(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | BASE
    for path in _files(package):
        for name in _imports(path):
            assert name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports pellucid.{name}"


def test_nothing_below_imports_the_top() -> None:
    for package in MAY_IMPORT:
        for path in _files(package):
            assert not {name.split(".")[0] for name in _imports(path)} & TOP


def test_the_orchestrator_never_sees_the_engine() -> None:
    for path in _files("orchestrator"):
        for name in _imports(path):
            if name.startswith("inference"):
                assert name.split(".")[1:2] and name.split(".")[1] in CLIENT_SIDE, f"{path} imports {name}"


def test_no_name_stands_for_two_classes() -> None:
    found = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in found.items() if number > 1} == set()


def test_no_docstring_starts_as_a_fragment() -> None:
    """One that starts with "Of" or "What" does not say who does what."""
    fragments = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith(("Of ", "What "))
    ]
    assert fragments == []


HEAVY = ("torch", "transformers", "aiohttp", "pyarrow", "peft", "datasets", "verifiers", "wandb", "uvicorn")
HEAVY += ("reasoning_gym",)
LIGHT = (
    "cli",
    "launch.rl",
    "launch.sft",
    "launch.render",
    "viewer",
    "checks.ledger",
    "checks.try_environment",
    "orchestrator",
)
IMPORTS = """
import importlib, sys
for name in sys.argv[1].split():
    importlib.import_module(f"pellucid.{name}")
    print(name, *(each for each in sys.argv[2].split() if each in sys.modules))
"""


def test_commands_start_without_what_takes_seconds_to_import() -> None:
    """`tests/test_warm.py` says the same of the parts that do need torch and transformers."""
    names = (*LIGHT, "checks.replay")
    command = [sys.executable, "-c", IMPORTS, " ".join(names), " ".join(HEAVY)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [*LIGHT, "checks.replay torch"]
