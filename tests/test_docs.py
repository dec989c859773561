"""The documentation is true: its code runs, its links lead somewhere, every public name has one."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import negchain

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
RECORDS = sorted((ROOT / "records").glob("**/*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FEWER = {"own_loop.py": "--epochs 1", "tiny_exact.py": "--visits 20"}  # for `make test`


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


WITH_CODE = [  # tutorials need their data: test_tutorials.py
    page
    for page in PAGES
    if "```python" in page.read_text(encoding="utf-8") and page.parent.name != "tutorials"
]


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
        line = text[: block.start(1)].count("\n")
        source = "\n" * line + block.group(1)  # so that a traceback names the page's own line
        exec(compile(source, str(page), "exec"), namespace)
    if page.name == "README.md":  # what it says its example shows
        dcl, emc2 = sorted(namespace["report"].rows, key=lambda row: row.method)
        assert emc2.relative_bias < 0.75 * emc2.noise
        assert emc2.noise == pytest.approx(0.3, abs=0.05)
        assert dcl.relative_bias == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _prose(page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(<?([^)\s>]+)>?\)", text)
    missing = []
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            missing.append(target)
    assert missing == []


def test_records_that_are_cited_are_there() -> None:
    """By name, with or without its ending; `git show COMMIT:records/NAME` is of one removed."""
    dated = r"(?<!:records/)\b\d{4}-\d\d-\d\d_(?!\d{6}_)[\w-]*\w"  # with six digits, a run's
    code = [path for name in ("src", "tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    known = {path.stem for path in (ROOT / "records").iterdir()}
    known |= {f"reproduce/{path.name}" for path in (ROOT / "records/reproduce").iterdir()}
    missing = []
    for path in [*PAGES, *RECORDS, *code]:
        cited = re.findall(
            rf"{dated}|\breproduce/[a-z][\w-]*\.jsonl", path.read_text(encoding="utf-8")
        )
        missing += [(_name(path), name) for name in cited if name not in known]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", FEWER)
def test_examples_run_shortly(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *FEWER[name].split()])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", negchain.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(negchain, name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    text = inspect.getdoc(value) or ""
    assert "Example" in text and ">>>" in text, f"{name} needs an example that runs"


CLAIM = re.compile(  # "the exact loss" is a name, not a claim
    r"\bunbiased\b|\bno bias\b(?! term)|(none|zero) at stationarity|partition: none"
    r"|(?<!loss, )\bexact\b(?!\W+(global\W+|negative\W+)?"
    r"(`?(global_)?loss|gradient|softmax|ones?\b|number|L\b|py\b|\d))",
    re.I,
)


def test_claims_of_no_bias_name_the_test_that_shows_them() -> None:
    """In the same section of a page, in the same docstring of a module; and that test is there."""
    bare, named = [], set()
    for path in [*PAGES, *sorted((ROOT / "src").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        docstrings = re.findall(r'"""(.*?)"""', text, re.S)
        parts = _prose(text).split("\n## ") if path.suffix == ".md" else docstrings
        bare += [(path, part) for part in parts if CLAIM.search(part) and "tests/" not in part]
        named |= {name for part in parts for name in re.findall(r"\btests/[\w/]+\.py", part)}
    assert bare == []
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def _site() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return found


def test_a_stream_is_one_of_a_gpu() -> None:
    """docs/glossary.md: random numbers have a use, losses panels and tiles, data are on disk."""
    sources = [*PAGES, *ROOT.glob("src/**/*.py")]
    other = re.compile(r"(?i)stream(ed|ing)(?!_)\b|random streams?\b|\bSTREAM_")
    found = [_name(p) for p in sources if other.search(p.read_text("utf-8"))]
    assert found == []


def test_every_page_is_in_the_site() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    docs = ROOT / "docs"
    there = [p for p in docs.rglob("*") if p.suffix in (".md", ".ipynb")]
    assert set(pages(_site()["nav"])) == {
        p.relative_to(docs).with_suffix(".md").as_posix() for p in there
    }


def test_the_api_page_names_every_public_name() -> None:
    """Add a line `::: negchain.NAME` to docs/api.md for each that is missing."""
    named = re.findall(r"^::: negchain\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted({*named} ^ {*negchain.__all__}) == [] and len(named) == len({*named})


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`make docs`: equations, API and every link; broken ones are warnings, and those errors."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    design = (tmp_path / "design.html").read_text(encoding="utf-8")
    assert design.count("<math") >= 5 and "img/step.svg" in design and "$$" not in design
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert [name for name in negchain.__all__ if f'id="negchain.{name}"' not in api] == []
    assert "EMC2Loss" in (tmp_path / "search/search_index.json").read_text(encoding="utf-8")
    addresses = r'<(?:script|link|img)[^>]*(?:src|href)="https?:'
    pages = tmp_path.rglob("*.html")
    assert [p for p in pages if re.search(addresses, p.read_text(encoding="utf-8"))] == []
    _search_without_a_server(tmp_path)


def _search_without_a_server(site: Path) -> None:
    """A reader opens a page as a file, types a word and finds pages."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    page = site / "methods/emc2.html"
    deed = """<script>setTimeout(() => {
      document.querySelector("#__search").click();
      const asked = document.querySelector("input[name=query]");
      asked.value = "temperature";
      for (const kind of ["input", "keyup"]) asked.dispatchEvent(new Event(kind, {bubbles: true}));
    }, 500)</script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", deed), encoding="utf-8")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000",
         f"--user-data-dir={site / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert re.search(r"search-result__meta[^>]*>\s*\d+ matching documents", done.stdout)


def test_the_index_of_records_names_the_pages_that_quote_them() -> None:
    index = (ROOT / "records/README.md").read_text(encoding="utf-8")
    pages = {
        str(page.relative_to(ROOT)).removesuffix("README.md") or "README": page.read_text("utf-8")
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    }
    listed = re.findall(r"^\| \[[^]]*\]\((2[^)]*)\) \|.*\| ([^|]*) \|$", index, flags=re.M)
    assert len(listed) > 30
    for record, used in listed:
        name = record.removesuffix("/README.md")
        quoting = {page for page, text in pages.items() if name in text}
        told = set(re.findall(r"README|docs/[\w./-]+", used))
        for page in quoting:
            assert any(page == t or page.startswith(t + "/") for t in told), (record, page)
        for t in told:
            assert any(page == t or page.startswith(t + "/") for page in quoting), (record, t)
