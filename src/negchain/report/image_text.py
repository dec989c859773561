"""What the report shows of pictures with captions: recall both ways, and what is retrieved."""

from html import escape
from typing import Any

from .galleries import VERDICTS, Pixels, block, figure, kept, row, views
from .measures import Metric, Shown
from .runs import Run

_WAYS = {"i2t": ("Picture to caption", "One of a picture’s captions"),
         "t2i": ("Caption to picture", "A picture that has the caption")}  # fmt: skip


def _recall(way: str, k: int, split: str) -> Metric:
    title, wanted = _WAYS[way]
    note = f"{wanted} is the nearest" if k == 1 else f"{wanted} is among the {k} nearest"
    key = f"{'test_' if split == 'test' else ''}{way}_r{k}"
    return Metric(key, f"{title}, R@{k}, {split}", "percent", note, True, f"{split} {way} R@{k}")


_MEAN = ("percent", "Of R@1, 5 and 10 both ways", True)
MEAN = Metric("mean_recall", "Mean recall, validation", *_MEAN, "validation mean recall")
TEST_MEAN = Metric("test_mean_recall", "Mean recall, test", *_MEAN, "test mean recall")
TEST = [_recall(way, k, "test") for way in _WAYS for k in (1, 5, 10)]
VALIDATION = [_recall(way, 1, "validation") for way in _WAYS]
BETA = Metric("beta", "Learned β", "number", "Inverse temperature at the end, at most 100")


def _pictures(run: Run, small: bool) -> list[tuple[str, str, Any]]:
    rows = 4 if small else 12
    return [
        ("Captions found for pictures", _captions_found(run, rows), None),
        ("Pictures found for captions", _pictures_found(run, rows), None),
        ("What the chains hold", _chains(run, rows), None),
        ("What the image encoder sees", "" if small else views(run), None),
    ]


def _captions_found(run: Run, rows: int) -> str:
    found = ("found_captions", "found_captions_right", "found_captions_similarity")
    cards = []
    for image, own, *answers in kept(run, rows, "asked_images", "asked_images_captions", *found):
        lines = []
        for text, right, similarity in zip(*answers, strict=True):
            look, mark, _ = VERDICTS[bool(right)]
            told = f"{mark}{escape(str(text))} <small>{similarity:.2f}</small>"
            lines.append(f'<li class="{look}">{told}</li>')
        cards.append(_told(image, own, f"<ol>{''.join(lines)}</ol>"))
    return block(
        f"Each {run.query_noun} with one of its own captions (bold), then the nearest captions of "
        "all, with the cosine similarity. ✓ is a caption of the picture. A ✗ that fits as well is "
        "a false negative: the data does not say so.",
        cards,
    )


def _told(image: Pixels, own: Any, html: str, more: str = "") -> str:
    """A picture with a caption of its own, and HTML below it."""
    beside = f"<div><b>{escape(str(own))}</b>{html}</div>"
    return f'<div class="told">{figure(image, str(own))}{beside}{more}</div>'


def _pictures_found(run: Run, rows: int) -> str:
    found = ("found_images", "found_images_right", "found_images_similarity")
    cards = []
    for asked, *answers in kept(run, rows, "asked_captions", *found):
        figures = []
        for image, right, similarity in zip(*answers, strict=True):
            look, mark, _ = VERDICTS[bool(right)]
            caption = f"{mark}{similarity:.2f}"
            figures.append(figure(image, "retrieved picture", caption, f' class="{look}"'))
        cards.append(row(f'<div class="query">{escape(str(asked))}</div>', figures))
    return block(
        "Each caption, then the pictures nearest to it. ✓ in a solid frame: the picture has this "
        "caption.",
        cards,
    )


def _chains(run: Run, rows: int) -> str:
    held = ("chain_held_captions", "chain_held_images")
    return block(
        "Each training picture with a caption, the caption that the picture’s chain holds as a "
        "negative, and (right) the picture that the caption’s chain holds.",
        (
            _told(
                image,
                own,
                f"<p>holds: {escape(str(caption))}</p>",
                figure(other, "picture the chain of the caption holds"),
            )
            for image, own, caption, other in kept(
                run, rows, "chain_images", "chain_captions", *held
            )
        ),
    )


SHOWN = Shown(
    noun="images",
    tested="held-out images and their captions",
    lead=(MEAN, TEST_MEAN),
    secondary=(*TEST, *VALIDATION, BETA),
    columns=(MEAN, TEST_MEAN, TEST[0], TEST[3]),
    baselines={"untrained": "Encoder at the start"},
    explained="The best encoder is chosen on validation images; test images only report. "
    "Recall is lower among more candidates: compare within a split, never between the two. "
    "Captions that read alike are one. Encoder at the start: both towers before the first step.",
    pictures=_pictures,
)
