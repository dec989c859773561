"""One HTML document: everything inside it, nothing fetched.

The page's style and script are `page.css` and `page.js` beside this file. A content security
policy in the page forbids all network access and every script but that one, so a file name that
holds markup stays text even if escaping were to fail.
"""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from negchain.files import replacing
from negchain.methods import METHODS

POINTS = 200  # a curve's points on a page


@dataclass
class Page:
    """HTML in reading order, and the numbers of charts and maps for the page's script."""

    html: list[str] = field(default_factory=list)
    charts: dict[str, Any] = field(default_factory=dict)
    maps: dict[str, Any] = field(default_factory=dict)

    def add(self, html: str) -> None:
        """Append a piece; an empty one leaves no trace."""
        self.html.append(html)

    def write(self, out: Path, title: str) -> None:
        """Write the document; a reader sees the old page or the new one, never half."""
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            file.write(_document(title, self).encode("utf-8", "backslashreplace"))


def _document(title: str, page: Page) -> str:
    here = files(__package__ or "negchain.report")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    for number, theme in enumerate(("light", "dark")):
        colours = " ".join(f"--{name}: {m.colour[number]};" for name, m in METHODS.items())
        style = style.replace(f"/*{theme}-methods*/", colours)
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    # "<" may not stand in a script element's text, whatever its type
    numbers = {"charts": page.charts, "maps": page.maps}
    data = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    means = f" Curves of more than {POINTS} points show means of equal stretches."
    means *= bool(page.charts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · negchain</title><style>{style}</style></head>"
        f"<body><main>{''.join(page.html)}</main><footer>Written by negchain.{means}</footer>"
        f'<script type="application/json" id="negchain-data">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )
