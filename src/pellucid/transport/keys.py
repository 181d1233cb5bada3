"""`pellucid keys DIR`: CurveZMQ key pairs for batches that leave the machine.

    trainer.secret        the trainer's machine only          trainer.public        both machines
    orchestrator.secret   the orchestrator's machine only     orchestrator.public   both machines

The trainer lets in who holds the secret of another public key of its folder. Traffic is encrypted.
"""

import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

import zmq

from pellucid.config.tools import KeysSettings
from pellucid.data.files import read_whole
from pellucid.errors import ConfigError, DataError

PARTS = ("trainer", "orchestrator")
_KEY_LENGTH = 40
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


def run_keys(settings: KeysSettings) -> None:
    make_keys(settings.folder)
    print(
        f"keys are in {settings.folder}; set transport.keys to it. On two machines, give each the .public "
        "files and its own .secret, and never the other's."
    )


def make_keys(folder: Path) -> None:
    """Writes a key pair for each part; existing keys are never replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / f"{part}.{kind}" for part in PARTS for kind in ("secret", "public")):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another folder, or delete the old keys first")
    for part in PARTS:
        public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
        _write(folder / f"{part}.secret", f'secret = "{secret}"\n', 0o600)
        _write(folder / f"{part}.public", f'public = "{public}"\n', 0o644)


def _write(path: Path, text: str, mode: int) -> None:
    """Creates the file with its final permissions: nobody can read a secret before it is protected."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def own_keys(folder: Path, part: str) -> KeyPair:
    path = folder / f"{part}.secret"
    secret = _read(path, "secret")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"transport.keys: {path} can be read by others; protect it: chmod 600 {path}")
    return KeyPair(zmq.curve_public(secret), secret)


def trainer_key(folder: Path) -> bytes:
    return _read(folder / "trainer.public", "public")


def allowed_keys(folder: Path) -> frozenset[bytes]:
    """Reads all public keys in the folder but the trainer's."""
    return frozenset(_read(path, "public") for path in folder.glob("*.public") if path.stem != "trainer")


def _read(path: Path, kind: str) -> bytes:
    try:
        key = tomllib.loads(read_whole(path, _MAX_FILE_BYTES).decode("ascii"))[kind]
        if not isinstance(key, str) or len(key) != _KEY_LENGTH:
            raise ValueError(f"a key has {_KEY_LENGTH} characters")
    except (OSError, DataError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"transport.keys: {path} holds no {kind} key ({error}); make the folder with "
            f"`pellucid keys {path.parent}`"
        ) from error
    return key.encode("ascii")
