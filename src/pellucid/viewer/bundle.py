"""Our ES modules as one classic script: browsers refuse to load modules into a page opened from a file.

    import { a, b } from "./x.js";        const { a, b } = $x;
    export function f() {}          ->    function f() {}
                                          return { f };

Each module becomes a function that is called once, in the order of its imports. What a module may contain is
therefore limited: named imports, and `export` in front of a declaration.
"""

import re
from importlib.resources import files
from posixpath import dirname, join, normpath

from pellucid.errors import DataError

ENTRY = "main.js"
UPLOT = "vendor/uPlot.iife.min.js"

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";?\n', re.MULTILINE)
_EXPORT = re.compile(
    r"^export\s+((?:async\s+)?function\*?|class|const|let)\s+([A-Za-z_$][\w$]*)", re.MULTILINE
)


def asset(name: str) -> str:
    return (files("pellucid.viewer") / "assets" / name).read_text(encoding="utf-8")


def bundle(entry: str = ENTRY) -> str:
    parts: dict[str, str] = {}
    _visit(entry, parts, [])
    return '"use strict";\n' + "\n".join(parts.values())


def vendored() -> str:
    """uPlot as a function that returns it: it is run when the first chart is drawn, and not before.

    While it loads it makes formats of numbers and dates, which takes a browser longer than all the rest of it
    and which no axis of ours needs: `Intl` is a parameter.
    """
    return f"window.loadUPlot = (Intl) => {{\n{asset(UPLOT)}\nreturn uPlot;\n}};"


def _visit(path: str, parts: dict[str, str], above: list[str]) -> None:
    if path in above:
        raise DataError(f"viewer module {path} imports itself through {' → '.join([*above, path])}")
    source = asset(path)
    for match in _IMPORT.finditer(source):
        target = _resolve(path, match[2])
        if target not in parts:
            _visit(target, parts, [*above, path])
    parts[path] = _wrap(path, source)


def _wrap(path: str, source: str) -> str:
    def rewrite(match: re.Match[str]) -> str:
        names = ", ".join(name.strip().replace(" as ", ": ") for name in match[1].split(",") if name.strip())
        return f"const {{ {names} }} = {_variable(_resolve(path, match[2]))};\n"

    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(rewrite, source))
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise DataError(f"viewer module {path} has an import or export of a form that cannot be bundled")
    return f"const {_variable(path)} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _variable(path: str) -> str:
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))


def _resolve(importer: str, target: str) -> str:
    return normpath(join(dirname(importer), target))
