"""How the documentation site is built: `make docs`.

Pages are plain Markdown that also reads well where it lies. A page joins the site by its line in `index.md`:
the links below each heading there are the entries of the navigation under that heading.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

project = "pellucid"
author = "the pellucid authors"
release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["images/**"]
myst_heading_anchors = 4  # GitHub's anchors, so that page.md#heading works in both places
myst_links_external_new_tab = False
highlight_language = "text"  # blocks without a language are output and pictures, not Python
nitpicky = True


def _theme(paper: str, panel: str, rule: str, ink: str, muted: str, accent: str, soft: str) -> dict[str, str]:
    """The viewer's colours, under the theme's names."""
    return {
        "color-background-primary": paper,
        "color-background-secondary": panel,
        "color-background-border": rule,
        "color-foreground-primary": ink,
        "color-brand-primary": accent,
        "color-brand-content": accent,
        "color-brand-visited": accent,
        "color-code-background": panel,
        "color-code-foreground": ink,
        "color-highlight-on-target": soft,
        "color-sidebar-link-text": muted,
        "color-sidebar-link-text--top-level": ink,
        "sidebar-item-spacing-vertical": "0.28rem",
    }


html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_title = "pellucid"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": _theme(
        "#fdfcfa", "#f6f4ef", "#e4e0d8", "#1c1e22", "#666a70", "#0b6b74", "#d8ebec"
    ),
    "dark_css_variables": _theme("#16181b", "#1d2024", "#2e3238", "#e9e7e2", "#a0a4ab", "#62c4cc", "#17383b"),
}
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """`index.md` gets a hidden table of contents per heading: `- [Run](run.md): …` is the entry `Run`."""
    if name != "index":
        return
    for section in source[0].split("\n## ")[1:]:
        entries = re.findall(r"^- \[(.+?)\]\(([\w-]+)\.md\)", section, flags=re.MULTILINE)
        options = [":hidden:", f":caption: {section.splitlines()[0]}", ""]
        lines = ["\n```{toctree}", *options, *(f"{title} <{page}>" for title, page in entries), "```\n"]
        source[0] += "\n".join(lines)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
