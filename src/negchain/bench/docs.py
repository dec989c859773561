"""Tables of a record in the documentation, between markers that `negchain bench --docs` fills.

    <!-- bench:step -->
    (written by the command: the record's name, then the table)
    <!-- /bench -->

`bench:summary_step` holds the headline rows of that table.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from negchain.bench.record import Record, grid, markdown, read
from negchain.files import replacing
from negchain.train.config import ConfigError

PAGES = ("README.md", "docs/speed.md")
BLOCK = re.compile(r"(<!-- bench:(\w+) -->\n)(.*?)(<!-- /bench -->)", re.S)
SUMMARY = "summary_"


def render(record: Record, name: str, link: str) -> str | None:
    """The text of a block, `link` leading to the record's page; None if the record has none."""
    quick = ", a quick run: it shows the form, not the speed" if record.quick else ""
    head = f"From [{Path(link).stem}]({link}): {record.hardware}, commit {record.commit}{quick}."
    subject = name.removeprefix(SUMMARY)
    if subject in record.failed:
        return f"{head}\n\nNot measured: {record.failed[subject]}\n"
    table = record.table(subject)
    if table is None:
        return None
    if subject == name:
        return f"{head}\n\n{markdown(table)}\n"
    return f"{head}\n\n{grid(tuple(row for row in table.rows if row.headline))}\n"


def rewrite(text: str, record: Record, link: str) -> tuple[str, list[str], list[str]]:
    """A page with the blocks filled that the record has tables for; names of those, and others.

    >>> record = Record(date="", command="", hardware="", versions={}, commit="", seed=0,
    ...                 quick=False, failed={"step": "no."})
    >>> rewrite("<!-- bench:scan --><!-- bench:step -->", record, "r.md")[1:]
    ([], [])
    >>> text = "<!-- bench:step -->\\nold\\n<!-- /bench -->"
    >>> rewrite(text, record, "r.md")[1:]
    (['step'], [])
    """
    done: list[str] = []
    left: list[str] = []

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        body = render(record, name, link)
        (left if body is None else done).append(name)
        return match[0] if body is None else f"{match[1]}{body}{match[4]}"

    return BLOCK.sub(fill, text), done, left


def rewrite_pages(path: Path, root: Path) -> tuple[list[str], list[str]]:
    """Fill the blocks of the pages below `root` from a record; what was filled, what was not."""
    record = read(path)
    filled: list[str] = []
    left: list[str] = []
    missing = [name for name in PAGES if not (root / name).is_file()]
    if missing:
        raise ConfigError(
            f"--docs rewrites {' and '.join(PAGES)} of a source checkout and {root} has no "
            f"{missing[0]}; run it in the root of the checkout"
        )
    for name in PAGES:
        target = root / name
        link = Path(os.path.relpath(path.with_suffix(".md").resolve(), target.parent.resolve()))
        text, done, others = rewrite(target.read_text(encoding="utf-8"), record, link.as_posix())
        with replacing(target) as file:
            file.write(text.encode())
        filled += [f"{name}: {block}" for block in done]
        left += [f"{name}: {block}" for block in others]
    return filled, left
