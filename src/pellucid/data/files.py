"""Files that are whole or not there."""

from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """A reader sees the file as it was or as it shall be; a killed writer leaves it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
