"""Access rules of pellucid's HTTP servers, and the key of a run.

Every page that a browser has open on this machine can reach its servers, and so can every user of the
machine. So a server

- answers to its own names only, while it is bound to this machine: a page whose name was made to resolve to
  127.0.0.1 (DNS rebinding) still sends that name as `Host`;
- refuses requests of pages of another origin, which browsers name in `Origin`;
- needs the run's key for every change.

The key is a random word in the file `key` of the run folder, which only the run's user can read. The first
process of the run makes it, and the others read it.
"""

import errno
import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from pellucid.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_NAME = "key"
_KEY = re.compile(r"[!-~]{16,1000}")
_MAX_KEY_BYTES = 4096


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than `localhost` may be anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def answers_to(bound: str, host: str) -> bool:
    """Whether the header `Host: host` means a server that is bound to `bound`.

    Beyond loopback a machine has names that it cannot know, so any name is accepted.
    """
    return not is_loopback(bound) or is_loopback(_name_in(host))


def is_foreign(origin: str | None, host: str) -> bool:
    """Whether a page of another site sent a request to `host`, by the request's header `Origin`."""
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")


def _name_in(host: str) -> str:
    """`localhost:8000` -> `localhost`, `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def shows_key(authorization: str, key: str) -> bool:
    """Whether the header `Authorization` is `Bearer` and the key."""
    scheme, _, shown = authorization.partition(" ")
    return scheme.lower() == "bearer" and is_secret(shown.strip(), key)


def is_secret(shown: str, secret: str) -> bool:
    """Compares in a time that tells nothing of the secret; `shown` may be any text."""
    return hmac.compare_digest(shown.encode(errors="replace"), secret.encode())


def server_key(run_dir: Path, key_file: Path | None) -> str:
    """Returns the key in `key_file`, else that of the run in this folder; makes one if there is none."""
    if key_file is not None:
        return read_key(key_file, "inference.key_file")
    path = run_dir / KEY_NAME
    if not path.exists():
        _make_key(path)
    return read_key(path, "the key of the run")


def weights_key(key: str) -> str:
    """Derives the key that reads a run's weights from the run's key, which it does not give away."""
    return hmac.new(key.encode(), b"pellucid: read weights", "sha256").hexdigest()


def _make_key(path: Path) -> None:
    """Makes the file whole and protected, or leaves the one that another process has just made."""
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{secrets.token_urlsafe(32)}\n")
            with suppress(FileExistsError):
                os.link(partial, path)
        finally:
            partial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path}: the key of the run cannot be made ({error.strerror}); name a file that holds one with "
            "inference.key_file"
        ) from error


def read_key(path: Path, setting: str) -> str:
    """Reads a key; messages name the file by `setting` and never show its content."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would make us wait
            raise OSError(errno.EINVAL, "it is no file")
        with path.open("rb") as file:
            key = file.read(_MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(
            f"{setting}: {path} cannot be read ({reason}); give it the `{KEY_NAME}` file of the run folder "
            "that the server was started with"
        ) from error
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{setting}: {path} holds no key, which is one word of 16 to 1,000 ASCII characters; delete the "
            "file, so that the run makes another, or name one that holds a key"
        )
    if stat.S_IMODE(mode) & 0o077:
        logger.warning("%s can be read by others; protect it: chmod 600 %s", path, path)
    return key
