"""What `mkdocs build` does beyond its plugins: pages from outside docs/, and equations.

* A link out of docs/ (a record, an example, a source file) becomes a page of the site: Markdown as
  it is, code as a code block. So every link that works in the repository works here.
* A notebook becomes a page with its outputs.
* Equations in $...$ and $$...$$ become MathML, which browsers draw without any script.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()<?([^)\s>#]+)>?(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", "": "make"}


def _home(page: str) -> PurePosixPath:
    """Where in the repository a page of the site comes from."""
    return PurePosixPath("docs") / page if (ROOT / "docs" / page).exists() else PurePosixPath(page)


def _place(path: str) -> str:
    """Where on the site a file of the repository is."""
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return path if path.endswith(".md") else path + ".md"


def _outside(text: str, home: PurePosixPath) -> dict[str, str]:
    """Links of a page to files of the repository: as written, and from its root."""
    found = {}
    for _, target, _, _ in LINK.findall(_prose(text)):
        if re.match(r"\w+:", target):
            continue
        path = os.path.normpath(home.parent / target)
        if (ROOT / path).is_file() and not path.startswith(".."):
            found[target] = path
    return found


def _prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def _page_of(notebook: Path) -> str:
    """A notebook as Markdown: text, code, what it printed and drew."""
    parts = [f"[This page as a notebook]({notebook.name}){{: download }}\n"]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for out in cell["outputs"]:
            data = out.get("data", {})
            if "image/png" in data:
                parts.append(f"![plot](data:image/png;base64,{''.join(data['image/png'].split())})")
            else:
                text = "".join(out.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    title = parts.pop(1)  # first, above the link
    return "\n\n".join([title, *parts]) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add notebooks, every file that a page links to, and those that these link to."""
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        place = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=_page_of(notebook)))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        home = _home(waiting.pop())
        if not (ROOT / home).exists():  # a notebook's
            continue
        for path in _outside((ROOT / home).read_text(encoding="utf-8"), home).values():
            if path.startswith("docs/") or files.get_file_from_path(_place(path)) is not None:
                continue
            if path.endswith((".html", ".png", ".svg")):
                files.append(File.generated(config, path, content=(ROOT / path).read_bytes()))
                continue
            text = (ROOT / path).read_text(encoding="utf-8")
            if not path.endswith(".md"):
                language = LANGUAGES.get(Path(path).suffix, "text")
                text = f"# {path}\n\n````{language}\n{text}\n````\n"
            files.append(File.generated(config, _place(path), content=text))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ at their pages."""
    home = _home(page.file.src_uri)
    outside = _outside(markdown, home)
    here = PurePosixPath(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if target not in outside:
            return match.group(0)
        path = outside[target]
        place = path if path.endswith((".html", ".png", ".svg")) else _place(path)
        place = place.removeprefix("docs/")
        return f"{opening}{os.path.relpath(place, here)}{anchor or ''}{closing}"

    return LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn what arithmatex marked into MathML."""

    def drawn(match: re.Match[str]) -> str:
        latex = html.unescape(match.group(2)).strip().removeprefix("\\(").removesuffix("\\)")
        latex = latex.removeprefix("\\[").removesuffix("\\]").strip()
        block = match.group(1) == "div"
        return convert(latex, display="block" if block else "inline")

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', drawn, content, flags=re.S)


class ExamplesAsCode(griffe.Extension):
    """Docstrings say "Example:", for which griffe has no section; it has one for "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
