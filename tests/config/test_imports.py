"""Import paths of somebody's own code: what is wrong is named with the setting, and with the line."""

import asyncio
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from pellucid.config.imports import describe, load_attribute, place_of, require_package
from pellucid.errors import ConfigError

KEY = "trainer.loss.import_path"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_loss", raising=False)
    return tmp_path / "own_loss.py"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "x = 1\nimport no_such_package",
            r"ModuleNotFoundError: No .*'no_such_package' \(.*own_loss.py:2\)$",
        ),
        ("other = 1", "module 'own_loss' has no attribute 'loss'; write `package.module:name`"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(.*/own_loss.py:2\)$"),
        ("x = 1\ndef loss(", r"SyntaxError: .* \(.*/own_loss.py:2\)$"),
    ],
)
def test_a_module_that_cannot_be_used(module: Path, source: str, complaint: str) -> None:
    module.write_text(source)
    with pytest.raises(ConfigError, match=rf"^{KEY} = 'own_loss:loss' cannot be imported: {complaint}"):
        load_attribute("own_loss:loss", KEY)


def test_a_package_is_found_without_running_it(module: Path) -> None:
    module.write_text("raise SystemExit('ran')")
    require_package("own_loss.anything:loss", KEY)
    assert "own_loss" not in sys.modules
    with pytest.raises(
        ConfigError, match=f"^{KEY} = 'own_los:loss' cannot be imported: No module named 'own_los'"
    ):
        require_package("own_los:loss", KEY)


CALLS_BACK = """
def reward(answer):
    return lookup(answer)

def lookup(answer):
    return {}[answer]

def parse(load):
    return load("{")
"""


def failure(call) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_the_innermost_line_of_their_code_is_named(module: Path) -> None:
    """A library that they call, and pellucid itself, are not what has to be mended."""
    module.write_text(CALLS_BACK)
    reward, parse = (load_attribute(f"own_loss:{name}", KEY) for name in ("reward", "parse"))
    assert describe(failure(lambda: reward("x"))) == f"KeyError: 'x' ({module}:6)"
    assert place_of(failure(lambda: parse(json.loads))) == f"{module}:9"
    assert place_of(failure(lambda: parse(lambda text: load_attribute("no:such", KEY)))).startswith(
        str(Path(__file__).relative_to(Path.cwd()))
    )


def test_an_error_without_a_line_of_theirs_has_none() -> None:
    with pytest.raises(ConfigError) as caught:
        require_package("no_such:loss", KEY)
    inside = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test
    assert (place_of(inside), describe(inside)) == (None, f"ConfigError: {caught.value}")


def test_the_line_of_an_error_in_another_process(module: Path) -> None:
    """Its traceback comes back as text."""
    module.write_text(CALLS_BACK)
    reward = load_attribute("own_loss:reward", KEY)

    async def offload() -> Exception:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            asked = asyncio.get_running_loop().run_in_executor(executor, reward, "x")
            return (await asyncio.gather(asked, return_exceptions=True))[0]

    assert describe(asyncio.run(offload())) == f"KeyError: 'x' ({module}:6)"
