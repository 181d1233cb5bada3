"""Files on a disk that is full: whole as they were, and the error names them."""

import errno
import os
import subprocess
import sys
from pathlib import Path, PosixPath

import pytest

from full_disk import full_disk
from pellucid.data.files import append_whole, read_whole, replace_file, require_file, writing

FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")


def test_appending_goes_on_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for line in (b"one\n", b"two\n"):
        with path.open("ab", buffering=0) as file:
            append_whole(file, line)
    assert path.read_bytes() == b"one\ntwo\n"


class Vanishing(PosixPath):
    """A file that another process deletes as soon as somebody has looked at it."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        found = super().stat(follow_symlinks=follow_symlinks)
        self.unlink()
        return found


def test_a_file_that_vanishes_is_missing_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "OUTCOME").touch()
    require_file(Vanishing(tmp_path / "OUTCOME"))
    (tmp_path / "OUTCOME").touch()
    with pytest.raises(FileNotFoundError):
        read_whole(Vanishing(tmp_path / "OUTCOME"))


SHORT_WRITES = """
import errno, resource, sys
from pathlib import Path
from pellucid.data.files import append_whole

path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
with path.open("ab", buffering=0) as file:
    append_whole(file, b"1234567\\n")
    assert file.write(b"12345") == 2    # what `append_whole` is for: a part is written, without a word
    file.truncate(8)
    try:
        append_whole(file, b"1234567\\n")
    except OSError as error:
        assert (error.errno, error.filename) == (errno.EFBIG, str(path))
    else:
        sys.exit("was not refused")
    append_whole(file, b"9\\n")         # fits
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_what_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that fills up in the middle of a line."""
    path = tmp_path / "lines"
    subprocess.run([sys.executable, "-c", SHORT_WRITES, str(path)], check=True)
    assert path.read_bytes() == b"1234567\n9\n"


@needs_full_device
def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.symlink_to(FULL)
    with path.open("ab", buffering=0) as file, pytest.raises(OSError) as full:
        append_whole(file, b"x\n")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))


def test_a_replacement_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError) as full:
        replace_file(path, b"new")
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state"]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_replacement_never_goes_through_a_link(tmp_path: Path) -> None:
    """The hidden name of what is written is known, and a folder may come from anybody."""
    path, others = tmp_path / "state", tmp_path / "others"
    others.write_bytes(b"precious")
    (tmp_path / ".state.partial").symlink_to(others)
    replace_file(path, b"new")
    assert (path.read_bytes(), others.read_bytes()) == (b"new", b"precious")
    assert not path.is_symlink()


class LibraryError(Exception):
    pass


def test_an_error_told_in_words_becomes_the_error_that_it_was() -> None:
    with pytest.raises(OSError) as full, writing(Path("weights/step_3")):
        raise LibraryError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "weights/step_3")


def test_an_error_behind_another_comes_to_light() -> None:
    with pytest.raises(OSError) as full, writing(Path("checkpoints/step_3")):
        try:
            raise OSError(errno.EFBIG, "File too large")
        finally:
            raise LibraryError("unexpected pos 704 vs 598")
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, "checkpoints/step_3")


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(LibraryError, match="^header$"), writing(Path("weights/step_3")):
        try:
            raise FileNotFoundError("config.json")
        except FileNotFoundError:
            raise LibraryError("header") from None
    with pytest.raises(FileNotFoundError) as missing, writing(Path("weights/step_3")):
        Path("no/such/file").read_bytes()
    assert missing.value.filename == "no/such/file"
