"""Import paths of somebody's own code: what is wrong is named with the setting, and with the line."""

import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.config.imports import load_attribute, require_package
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
        ("import no_such_package", "No module named 'no_such_package'; write `package.module:name`"),
        ("other = 1", "module 'own_loss' has no attribute 'loss'; write `package.module:name`"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(own_loss.py:2\)$"),
        ("def loss(", r"SyntaxError: .*own_loss.py"),
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


def test_the_current_folder_counts(tmp_path: Path) -> None:
    """A console script does not look there, but the processes that it starts do."""
    (tmp_path / "own_loss.py").touch()
    program = "import sys; sys.path.remove(''); from pellucid.config.imports import require_package as r; "
    program += f"r('own_loss:loss', {KEY!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
