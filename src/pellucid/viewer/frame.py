"""The page around the data, the same for a page in a file and one that is served: markup, style, scripts.

    opening     <!doctype html> … the page without its data
    scripts     after the blocks that they need at once, before all others: drawing does not wait for those
    closing     </body></html>

Everything is in the one document, so that opening it takes one request. Only the scripts and the style whose
hashes are in the policy run or apply.

Our ES modules become one classic script: browsers refuse to load modules into a page opened from a file. An
import map of `data:` addresses works, but Chromium shows the first tokens 100 ms later, and the policy has to
allow every `data:` script, or browsers have to know `integrity` of import maps.

    import { a, b } from "./x.js";        const { a, b } = $x;
    export function f() {}          ->    function f() {}
                                          return { f };

Each module becomes a function that is called once, in the order of its imports. What a module may contain is
therefore limited: named imports, and `export` in front of a declaration.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from posixpath import dirname, join, normpath

import numpy as np
import orjson

from pellucid.data.schema import TOKEN_FIELDS
from pellucid.errors import DataError
from pellucid.viewer.rows import NUMBERS, WORDS

ENTRY = "main.js"
STYLES = ("vendor/uPlot.min.css", "page.css")

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";?\n', re.MULTILINE)
_EXPORT = re.compile(
    r"^export\s+((?:async\s+)?function\*?|class|const|let)\s+([A-Za-z_$][\w$]*)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Frame:
    opening: str
    scripts: str
    closing: str
    style: str
    policy: str


@cache
def frame() -> Frame:
    # uPlot is a function that returns it: it is run when the first chart is drawn, and not before. While it
    # loads it makes formats of numbers and dates, which takes a browser longer than all the rest of it and
    # which no axis of ours needs: `Intl` is a parameter.
    plot = f"window.loadUPlot = (Intl) => {{\n{asset('vendor/uPlot.iife.min.js')}\nreturn uPlot;\n}};"
    scripts = [plot, bundle()]
    style = "\n".join(asset(name) for name in STYLES)
    opening, closing = (
        asset("page.html").replace("</head>", f"<style>{style}</style>\n</head>").split("</body>")
    )
    return Frame(
        f'{opening}<script type="application/json" id="schema">{_schema()}</script>\n',
        "".join(f"<script>{script}</script>\n" for script in scripts),
        f"</body>{closing}",
        style,
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'",
    )


def _schema() -> str:
    """Returns the fields that a page knows of, as JSON that ends no element of HTML."""
    fields = [
        {
            "name": field.name,
            "label": field.label,
            "formula": field.formula,
            "key": field.key or field.name,
            "is_flag": field.dtype is np.bool_,
            "optional": field.optional,
            "needs_sampled": field.needs_sampled,
            "shade": field.shade,
        }
        for field in TOKEN_FIELDS
    ]
    text = orjson.dumps({"fields": fields, "words": WORDS, "numbers": NUMBERS}).decode()
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def block(name: str, data: bytes, *, is_served: bool = False) -> str:
    """Bytes as an inert part of a page: base64, so that none of them is parsed as HTML.

    `is_served`: they are not deflated, and there is a server to ask for everything else.
    """
    mark = " data-served" if is_served else ""
    return f'<script type="text/plain" id="{name}"{mark}>{base64.b64encode(data).decode("ascii")}</script>\n'


def asset(name: str) -> str:
    return (files("pellucid.viewer") / "assets" / name).read_text(encoding="utf-8")


def bundle(entry: str = ENTRY) -> str:
    """Returns the module and all that it imports as one script."""
    parts: dict[str, str] = {}
    _add_module(entry, parts, [])
    return '"use strict";\n' + "\n".join(parts.values())


def _add_module(path: str, parts: dict[str, str], above: list[str]) -> None:
    if path in above:
        raise DataError(f"viewer module {path} imports itself through {' → '.join([*above, path])}")

    def rewrite(match: re.Match[str]) -> str:
        target = normpath(join(dirname(path), match[2]))
        if target not in parts:
            _add_module(target, parts, [*above, path])
        names = ", ".join(name.strip().replace(" as ", ": ") for name in match[1].split(",") if name.strip())
        return f"const {{ {names} }} = {_variable(target)};\n"

    source = _IMPORT.sub(rewrite, asset(path))
    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _EXPORT.sub(r"\1 \2", source)
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise DataError(f"viewer module {path} has an import or export of a form that cannot be bundled")
    parts[path] = f"const {_variable(path)} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _variable(path: str) -> str:
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))
