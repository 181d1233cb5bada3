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
from types import CodeType, FrameType
from typing import Any

from warm import PARTS

IMPORT_FAILED = 97


def record_lines(package: str, into: Path) -> None:
    unseen: dict[CodeType, set[int]] = {}

    def note(frame: FrameType, event: str, argument: object) -> Any:
        left = unseen[frame.f_code]
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            with into.open("a") as file:  # a fork closes what is open
                file.write(f"{frame.f_code.co_filename}:{frame.f_lineno}\n")
        return note if left else None

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in unseen:
            is_ours = code.co_filename.startswith(package)
            unseen[code] = {line for *_, line in code.co_lines() if line} if is_ours else set()
        return note if unseen[code] else None

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
