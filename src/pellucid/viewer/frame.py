"""The page around the data, the same for a page in a file and one that is served: markup, style, scripts.

    opening     <!doctype html> … the page without its data
    scripts     after the blocks that they need at once, before all others: drawing does not wait for those
    closing     </body></html>

Everything is in the one document, so that opening it takes one request. Only the scripts and the style whose
hashes are in the policy run or apply.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache

from pellucid.viewer.bundle import asset, bundle, vendored

STYLES = ("vendor/uPlot.min.css", "page.css")


@dataclass(frozen=True, slots=True)
class Frame:
    opening: str
    scripts: str
    closing: str
    policy: str


@cache
def frame() -> Frame:
    scripts = [vendored(), bundle()]
    style = "\n".join(asset(name) for name in STYLES)
    html = asset("page.html").replace("</head>", f"<style>{style}</style>\n</head>")
    opening, closing = html.split("</body>")
    return Frame(
        opening,
        "".join(f"<script>{script}</script>\n" for script in scripts),
        f"</body>{closing}",
        content_policy(scripts, style),
    )


def content_policy(scripts: list[str], style: str) -> str:
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def block(name: str, data: bytes, *, is_served: bool = False) -> str:
    """Bytes as an inert part of a page: base64, so that none of them is parsed as HTML.

    `is_served`: they are not deflated, and there is a server to ask for everything else.
    """
    mark = " data-served" if is_served else ""
    return f'<script type="text/plain" id="{name}"{mark}>{base64.b64encode(data).decode("ascii")}</script>\n'


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
