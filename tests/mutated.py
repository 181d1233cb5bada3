"""`python -m mutated …`: `pellucid …`, where a package that cannot be imported has an exit code of its own.

With MUTATED_LINES=FILE, every line of pellucid that is executed, here or in a fork, is written there once.
"""

import os
import runpy
import sys
import threading
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from warm import PARTS

IMPORT_FAILED = 97


def record_lines(package: str, into: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and (place := (frame.f_code.co_filename, frame.f_lineno)) not in seen:
            seen.add(place)
            with into.open("a") as file:  # a fork closes what is open
                file.write(f"{place[0]}:{place[1]}\n")
        return note

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return note if frame.f_code.co_filename.startswith(package) else None

    threading.settrace(enter)
    sys.settrace(enter)


def main() -> None:
    spec = find_spec("pellucid")
    assert spec is not None and spec.origin is not None
    if into := os.environ.get("MUTATED_LINES"):
        record_lines(str(Path(spec.origin).parent), Path(into))
    try:
        for part in PARTS:
            import_module(f"pellucid.{part}")
    except BaseException:
        traceback.print_exc()
        sys.exit(IMPORT_FAILED)
    sys.modules.pop("pellucid.cli")
    runpy.run_module("pellucid.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
