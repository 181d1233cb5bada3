"""Keys are made once, protected, and checked when they are read."""

import stat

import pytest
import zmq

from pellucid.cli import main
from pellucid.errors import ConfigError
from pellucid.transport.zmq_link import allowed_keys, make_keys, own_keys, trainer_key


def test_the_command_makes_two_pairs(tmp_path, capsys) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {
        "trainer.secret": 0o600,
        "trainer.public": 0o644,
        "orchestrator.secret": 0o600,
        "orchestrator.public": 0o644,
    }
    assert str(folder) in capsys.readouterr().out
    trainer, orchestrator = (own_keys(folder, part) for part in ("trainer", "orchestrator"))
    assert zmq.curve_public(trainer.secret) == trainer.public == trainer_key(folder)
    assert allowed_keys(folder) == {orchestrator.public} != {trainer.public}
    assert main(["keys", str(folder)]) == 2
    assert "trainer.secret exists already" in capsys.readouterr().err
    assert own_keys(folder, "trainer") == trainer


def test_a_secret_that_others_can_read_is_refused(tmp_path) -> None:
    make_keys(tmp_path)
    (tmp_path / "trainer.secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others; protect it: chmod 600"):
        own_keys(tmp_path, "trainer")


@pytest.mark.parametrize("content", [None, "", 'secret = "short"', "secret = 3", "\x00", 'public = "x"'])
def test_what_is_not_a_key_is_refused(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "trainer.secret").write_text(content)
    with pytest.raises(ConfigError, match=r"transport.keys: .*trainer.secret holds no secret key"):
        own_keys(tmp_path, "trainer")


def test_every_further_public_key_lets_in(tmp_path) -> None:
    make_keys(tmp_path)
    second, _ = zmq.curve_keypair()
    (tmp_path / "second-orchestrator.public").write_text(f'public = "{second.decode()}"')
    assert second in allowed_keys(tmp_path) and len(allowed_keys(tmp_path)) == 2
