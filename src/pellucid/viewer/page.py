"""The HTML of a page: its assets inlined, its policy, its data.

    <meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-…'; …">

Only the script and the style whose hashes are in the policy run or apply; nothing is ever loaded. The data is
base64 in an inert JSON block, so that no byte of a run is parsed as HTML.
"""

import base64
import hashlib
from importlib.resources import files

import orjson

from pellucid.viewer.collect import PageData
from pellucid.viewer.colour import fill_palettes
from pellucid.viewer.records import deflate

SCRIPTS = ("format.js", "table.js", "token.js", "record.js", "page.js")


def render_page(data: PageData) -> str:
    style = fill_palettes(_asset("page.css"))
    script = '"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS)
    block = orjson.dumps({"head": deflate(data.head), "records": data.records}).decode("ascii")
    slots = {"policy": content_policy(script, style), "style": style, "data": block, "script": script}
    parts = _asset("page.html").split("{{")
    filled = [parts[0]]
    for part in parts[1:]:
        slot, _, rest = part.partition("}}")
        filled += [slots[slot], rest]
    return "".join(filled)


def content_policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _asset(name: str) -> str:
    return (files("pellucid.viewer") / "assets" / name).read_text(encoding="utf-8")
