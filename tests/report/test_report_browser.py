"""The page in headless Chromium: charts draw, the pointer is answered, no script error."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from fabricate_runs import (
    digit_artifacts,
    make_config,
    make_metrics,
    write_comparison,
    write_many,
    write_run,
)
from PIL import Image
from test_measures import COUNTS

from negchain.report import write_report

ROOT = Path(__file__).resolve().parents[2]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

# What a reader does, in the order given; each deed leaves its outcome on <html>.
_READER = """<script>
const root = document.documentElement;
function point(svg, x, y) {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove",
    {clientX: box.left + box.width * x, clientY: box.top + box.height * y}));
  const tip = document.querySelector(".tip");
  const text = tip ? tip.innerText.replace(/\\s+/g, " ") : "none";
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  return text;
}
root.dataset.counts = COUNTS.map((value) => format(value, "count")).join(" ");
root.dataset.tip = point(document.querySelector(".by-samples svg.chart"), .5, .5);
root.dataset.left = document.querySelectorAll(".tip").length;
document.querySelectorAll("details").forEach((one) => { one.open = true; });
const dots = document.querySelector("[data-map] svg");
const path = dots.querySelector(".dots").getAttribute("d").match(/M([\\d.]+) ([\\d.]+)/);
root.dataset.map = point(dots, path[1] / 720, path[2] / 520);
const shown = () => [...document.querySelectorAll("svg.chart")]
  .filter((svg) => svg.getBoundingClientRect().width > 0).map((svg) => svg.dataset.chart);
root.dataset.before = shown().every((key) => key.endsWith("-samples"));
document.querySelector("label[for=by-seconds]").click();
root.dataset.after = shown().length > 0 && shown().every((key) => key.endsWith("-seconds"));
const button = document.querySelector(".curves > .legend button, .map .legend button");
button.click();
root.dataset.dimmed = document.querySelectorAll(".dim").length;
button.click();
root.dataset.again = document.querySelectorAll(".dim").length;
root.dataset.wide = root.scrollWidth > root.clientWidth;
root.dataset.clipped = [...document.querySelectorAll(".tile b")]
  .filter((value) => value.scrollWidth > value.clientWidth).map((value) => value.innerText);
const names = [...document.querySelectorAll(".confusion .name[text-anchor]")];
root.dataset.name = Math.min(...names.map((name) => name.getBoundingClientRect().height));
document.body.style.width = "390px";  // a phone: the window itself is 500 at least
const matrix = document.querySelector(".confusion svg");
root.dataset.scrolls = matrix && matrix.parentNode.scrollWidth > matrix.parentNode.clientWidth;
const queries = [...document.querySelectorAll(".side .query figcaption")];
root.dataset.query = Math.min(...queries.map((text) => text.getBoundingClientRect().width));
root.dataset.cut = [...document.querySelectorAll(".wide .frame text")].filter((text) =>
  text.getBoundingClientRect().left < text.closest(".wide svg").parentNode
    .getBoundingClientRect().left).length;
</script></body>"""


def dom(page: Path, profile: Path, *, read: bool, width: int = 500) -> str:
    text = page.read_text(encoding="utf-8")
    if read:  # the page's own policy would, rightly, refuse the reader's script
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        page = page.with_suffix(".read.html")
        reader = _READER.replace("COUNTS", str(list(COUNTS)))
        page.write_text(text.replace("</body>", reader), encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom",
         page.resolve().as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def outcome(text: str, name: str) -> str | None:
    root = re.search(r"<html[^>]*>", text)
    assert root is not None
    found = re.search(rf'data-{name}="([^"]*)"', root.group())
    return found.group(1) if found else None


def check(text: str) -> None:
    assert outcome(text, "error") is None
    assert outcome(text, "ready") == "true"
    assert not re.search(r"https?://", text)


def test_run_page_as_written_runs_under_its_own_policy(tmp_path: Path) -> None:
    config = make_config("emc2")
    run = write_run(tmp_path / "r", config, make_metrics(config), artifacts=digit_artifacts())
    text = dom(write_report([run], tmp_path / "one.html"), tmp_path / "profile", read=False)
    check(text)
    assert text.count('<svg class="chart"') == 18 and text.count('<path class="line" d="M') == 20


def test_reading_a_run_page(tmp_path: Path) -> None:
    config = make_config("emc2")
    run = write_run(tmp_path / "r", config, make_metrics(config), artifacts=digit_artifacts())
    text = dom(write_report([run], tmp_path / "one.html"), tmp_path / "profile", read=True)
    check(text)
    tip = outcome(text, "tip") or ""
    assert re.fullmatch(r"[\d.]+k samples 1-NN [\d.]+ % probe [\d.]+ %", tip.strip())
    assert outcome(text, "counts") == " ".join(COUNTS.values())
    assert outcome(text, "left") == "0"
    assert (outcome(text, "map") or "").strip() == "0"  # the first class's first dot
    assert outcome(text, "before") == outcome(text, "after") == "true"
    assert int(outcome(text, "dimmed") or 0) >= 2 * 9 and outcome(text, "again") == "0"
    assert outcome(text, "wide") == "false"


@pytest.mark.parametrize("width", [500, 1050, 1200])
def test_no_headline_number_is_cut(tmp_path: Path, width: int) -> None:
    config = make_config("emc2")
    metrics = [*make_metrics(config), {"step": 901, "samples": 28832, "seconds": 59 * 60 + 59.0}]
    run = write_run(tmp_path / "r", config, metrics, artifacts=digit_artifacts())
    page = write_report([run], tmp_path / "one.html")
    assert "<b>59 min 59 s</b>" in page.read_text(encoding="utf-8")
    text = dom(page, tmp_path / "profile", read=True, width=width)
    assert outcome(text, "clipped") == ""


def test_reading_a_comparison(tmp_path: Path) -> None:
    paths = write_comparison(tmp_path / "runs", seeds=2)
    text = dom(write_report(paths, tmp_path / "all.html"), tmp_path / "profile", read=True)
    check(text)
    tip = outcome(text, "tip") or ""
    assert len(re.findall(r"% ± [\d.]+ %", tip)) == 7 and "SogCLR" in tip
    assert outcome(text, "before") == outcome(text, "after") == "true"
    assert int(outcome(text, "dimmed") or 0) > 7 and outcome(text, "again") == "0"
    assert outcome(text, "wide") == "false" and outcome(text, "cut") == "0"
    assert 100 < float(outcome(text, "query") or 0) < 390  # px: a long name keeps its words whole


def test_names_beside_the_matrix_can_be_read_on_a_phone(tmp_path: Path) -> None:
    page = write_report([write_many(tmp_path / "r", 37)], tmp_path / "many.html")
    text = dom(page, tmp_path / "profile", read=True)
    check(text)
    assert outcome(text, "wide") == "false"
    assert float(outcome(text, "name") or 0) >= 11  # px
    page = write_report([write_many(tmp_path / "two", 2)], tmp_path / "two.html")
    assert outcome(dom(page, tmp_path / "profile", read=True), "scrolls") == "false"


@pytest.mark.slow
def test_the_pictures_of_readme_are_made_by_their_command(tmp_path: Path) -> None:
    write_comparison(tmp_path / "runs", seeds=1)
    gallery = runpy.run_path(str(ROOT / "docs/gallery.py"))
    gallery["main"].__globals__["IMAGES"] = tmp_path
    gallery["main"](tmp_path / "runs")
    shown = re.findall(r"\(docs/img/(report-\w+\.png)\)", (ROOT / "README.md").read_text())
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(shown) and shown
    for name in shown:
        with Image.open(tmp_path / name) as image, Image.open(ROOT / "docs/img" / name) as kept:
            assert image.width == kept.width and len(image.convert("RGB").getcolors(10**6)) > 20
