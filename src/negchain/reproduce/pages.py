"""Tables and figures of records."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from negchain.files import replacing
from negchain.methods import METHODS, title_of
from negchain.progress import say
from negchain.reproduce import load
from negchain.reproduce.common import Row, read_rows, runs_of
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK = "--quick: small sizes and few steps; these are no results"


def has_runs(name: str, records: Path) -> bool:
    """Whether there are runs in all records that an experiment is made from."""
    return all(read_rows(records / f"{of}.jsonl") for of in runs_of(name))


def rows_of(name: str, records: Path, quick: bool = False) -> list[Row]:
    """The runs that an experiment is drawn from; each names its record."""
    experiment, found = load(name), list[Row]()
    for of in (*runs_of(name), *experiment.also):
        path = records / f"{of}.jsonl"
        rows = read_rows(path, load(of).needs)
        if not rows and of not in experiment.also:
            wrong = f"there are no runs in {path}, or only failed ones"
            remedy = f"negchain reproduce {of}{' --quick' if quick else ''} --out {records}"
            raise ConfigError(
                f"{wrong if path.exists() else f'there is no record {path}'}; run `{remedy}` first"
            )
        found += [{**row, "record": of} for row in rows]
    return found


def redraw(name: str, rows: list[Row], figures: Path, page: Path | None) -> None:
    """Table and figures of an experiment from its runs, and the table into the page of results.

    Where the page holds `<!-- table NAME -->` ... `<!-- end -->`, what is between is replaced.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "negchain", "svg.fonttype": "none", "font.size": 9})
    experiment, quick = load(name), any(row["job"].get("quick") for row in rows)
    figures.mkdir(parents=True, exist_ok=True)
    drawn, table = experiment.draw(rows), experiment.table(rows)
    for file, figure in drawn.items():
        if quick:
            figure.suptitle(QUICK)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
        (figures / f"{file}.svg").write_text(numbered(text.getvalue()), encoding="utf-8")
        say(f"figure: {figures / file}.svg")
    if table and not drawn:
        say(f"{name}: no figure, as no run has a linear probe or 1-NN: its data have no labels")
    if quick and table:
        print(f"{QUICK}\n")
    print(table or f"{name}: its records hold nothing to compare yet")
    if page is not None:
        written = page.read_text(encoding="utf-8")
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        changed = re.sub(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", written, flags=re.S)
        with replacing(page) as target:
            target.write(changed.encode())
        say(f"page: {page}")


def numbered(svg: str) -> str:
    """An SVG whose paths are named by order: matplotlib hashes floats that machines round apart.

    Example:
        >>> numbered('<path id="m0123456789"/><use href="#m0123456789"/><g id="p9876543210"/>')
        '<path id="m1"/><use href="#m1"/><g id="p2"/>'
    """
    names = dict.fromkeys(re.findall(r"\b[mp][0-9a-f]{10}\b", svg))
    number = {name: f"{name[0]}{i}" for i, name in enumerate(names, 1)}
    return re.sub(r"\b[mp][0-9a-f]{10}\b", lambda found: number[found[0]], svg)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    Example:
        >>> print(markdown(["a", "b"], [[1, "x"]]))
        | a | b |
        |---|---|
        | 1 | x |
    """
    head, *rows = (f"| {' | '.join(map(str, line))} |" for line in (heads, *lines))
    return "\n".join([head, f"|{'---|' * len(heads)}", *rows])


def filled(pattern: str, rows: Sequence[Row]) -> str:
    """A Markdown table from a line of heads and a line of cells with fields of the rows.

    Example:
        >>> print(filled("R|bound holds\\n{R}|{holds}", [{"R": 1, "holds": False}]))
        | R | bound holds |
        |---|---|
        | 1 | **no** |
    """
    words: dict[Any, str] = {True: "yes", False: "**no**"}
    heads, cells = pattern.split("\n")
    lines = []
    for row in rows:
        shown = {k: words[v] if isinstance(v, bool) else v for k, v in row.items()}
        shown["method"] = title_of(row.get("method", ""))
        lines.append(cells.strip().format_map(shown).split("|"))
    return markdown(heads.format_map(rows[0]).split("|"), lines)


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Mean and standard deviation over seeds.

    Example:
        >>> spread([0.5, 0.6]), spread([0.5]), spread([])
        ('0.550 ± 0.071', '0.500', '–')
    """
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    text = f"{statistics.fmean(found):.{digits}f}"
    return f"{text} ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else text


BOTH = ", both"  # ends the name of a method whose chains are offered both views, beside one


def label_of(name: str) -> str:
    """The title of a method, of one that is offered both views too; other names stay.

    Example:
        >>> label_of("emc2, both"), label_of("P = 16")
        ('EMC², both', 'P = 16')
    """
    method = name.removesuffix(BOTH)
    return f"{title_of(method)}{name[len(method) :]}"


def colour(method: str) -> str:
    """Its colour in figures."""
    name = method.removesuffix(BOTH)
    return METHODS[name].colour[0] if name in METHODS else "black"


def style(method: str) -> dict[str, Any]:
    """Its line and marker in figures: i-SIR's orange is close to EMC²'s vermilion."""
    isir = method.removesuffix(BOTH) == "isir"
    line = ":" if method.endswith(BOTH) else "--" if isir else "-"
    return {"linestyle": line, "marker": "s" if isir else ".", "markersize": 3 if isir else 6}


def distinct(rows: Iterable[Row], *keys: str) -> list[Any]:
    """The values of a key of the jobs (or tuples of several), in order of appearance.

    Example:
        >>> distinct([{"job": {"b": 4}}, {"job": {"b": 8}}, {"job": {"b": 4}}], "b")
        [4, 8]
    """
    found = [tuple(row["job"].get(key) for key in keys) for row in rows]
    return [value[0] if len(keys) == 1 else value for value in dict.fromkeys(found)]


def where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Rows whose job has these values."""
    return [row for row in rows if all(row["job"].get(k) == v for k, v in values.items())]


def plot_curves(
    axes: Any, rows: list[Row], x: str, y: str, label: str, tint: Any, method: str = ""
) -> None:
    """Mean over seeds of a curve of measurements, with the range between them shaded.

    Of runs that ended, where there are any; else as far as all of them came. `method`: whose style.
    """
    rows = [row for row in rows if row.get("complete", True)] or rows
    curves = [[p for p in row["curve"] if p.get(y) is not None] for row in rows]
    length = min((len(curve) for curve in curves), default=0)
    if length == 0:
        return
    at = [statistics.fmean(curve[i][x] for curve in curves) for i in range(length)]
    columns = [[curve[i][y] for curve in curves] for i in range(length)]
    means = [statistics.fmean(c) for c in columns]
    axes.plot(at, means, color=tint, label=label, **style(method))
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(at, low, high, color=tint, alpha=0.15)


def panels(count: int) -> tuple[Figure, list[Any]]:
    """A figure with some axes, at most three in a row."""
    from matplotlib.figure import Figure

    across = 2 if count == 4 else min(count, 3)
    down = -(-count // across)
    figure = Figure(figsize=(3.4 * across, 2.8 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]
