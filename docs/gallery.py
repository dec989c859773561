"""Pictures of report pages for README and the site: sections as PNG files, by headless Chromium.

negchain compare --methods dcl,sogclr,emc2 --seeds 2 --epochs 20 --eval-every 4 --out runs/gallery
python docs/gallery.py runs/gallery        # writes docs/img/report-*.png
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from negchain.report import write_report

IMAGES = Path(__file__).parent / "img"
SECTIONS = {  # which page, the heading of its section, pixels from the top to keep
    "curves": ("all", "Curves", 900),
    "map": ("one", "Map of the embeddings", 760),
    "neighbours": ("one", "Nearest neighbours", 560),
    "help": ("one", "Did training help?", 480),
}
WIDTH = 1100


def section(page: str, heading: str) -> str:
    """A page with one of its sections, the one under this heading."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    start, end = page.index("<main"), page.rindex("</main>")
    inner = next(s for s in re.findall(r"<section.*?</section>", page, re.S)
                 if re.search(rf"<h2[^>]*>{re.escape(heading)}", s))  # fmt: skip
    opening = page[start : page.index(">", start) + 1]
    return page[:start] + opening + inner + page[end:]


def picture(html: str, out: Path, height: int) -> None:
    """Photograph a page, without the empty space below it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("refused: the pictures are taken by chromium, which is not installed")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(html, encoding="utf-8")
        subprocess.run(
            [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--virtual-time-budget=3000", f"--user-data-dir={folder}/profile",
             f"--window-size={WIDTH},{height}", f"--screenshot={folder}/shot.png",
             f"file://{folder}/page.html"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with Image.open(f"{folder}/shot.png") as shot:
            image = shot.convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((1, image.height - 1)))
    box = ImageChops.difference(image, empty).getbbox()
    if box is not None:
        image = image.crop((0, 0, image.width, min(image.height, box[3] + 16)))
    image.quantize(128).save(out, optimize=True)


def main(folder: Path) -> None:
    """Photograph the sections of the runs in `folder`."""
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not runs:
        sys.exit(f"refused: {folder} holds no finished runs; see the commands at the top")
    one = next((run for run in runs if run.name.startswith("emc2")), runs[0])
    with tempfile.TemporaryDirectory() as place:
        pages = {"all": runs, "one": [one]}
        texts = {name: write_report(which, Path(place) / f"{name}.html").read_text(encoding="utf-8")
                 for name, which in pages.items()}  # fmt: skip
    for name, (page, heading, height) in SECTIONS.items():
        picture(section(texts[page], heading), IMAGES / f"report-{name}.png", height)
        print(IMAGES / f"report-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gallery"))
