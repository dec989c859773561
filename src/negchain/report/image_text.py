"""What the report shows of pictures with captions: recall both ways, and what is retrieved."""

from html import escape
from typing import Any

from .galleries import block, picture, views
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
    titled = [
        ("Captions found for pictures", _captions_found(run, rows)),
        ("Pictures found for captions", _pictures_found(run, rows)),
        ("What the chains hold", _chains(run, rows)),
    ]
    if not small:
        titled.append(("What the image encoder sees", views(run)))
    return [(title, html, None) for title, html in titled]


def _captions_found(run: Run, rows: int) -> str:
    art = run.artifacts
    if "found_captions" not in art:
        return ""
    cards = []
    for q in range(min(rows, len(art["asked_images"]))):
        own = str(art["asked_images_captions"][q])
        lines = "".join(
            f'<li class="{"same" if right else "other"}">{"✓" if right else "✗"} '
            f"{escape(str(text))} <small>{similarity:.2f}</small></li>"
            for text, right, similarity in zip(
                art["found_captions"][q],
                art["found_captions_right"][q],
                art["found_captions_similarity"][q],
                strict=True,
            )
        )
        cards.append(
            f'<div class="told"><figure>{picture(art["asked_images"][q], own)}</figure>'
            f"<div><b>{escape(own)}</b><ol>{lines}</ol></div></div>"
        )
    return block(
        f"Each {run.query_noun} with one of its own captions (bold), then the nearest captions of "
        "all, with the cosine similarity. ✓ is a caption of the picture. A ✗ that fits as well is "
        "a false negative: the data does not say so.",
        cards,
    )


def _pictures_found(run: Run, rows: int) -> str:
    art = run.artifacts
    if "found_images" not in art:
        return ""
    cards = []
    for q in range(min(rows, len(art["asked_captions"]))):
        images = art["found_images"][q]
        figures = "".join(
            f'<figure class="{"same" if right else "other"}">{picture(image, "retrieved picture")}'
            f"<figcaption>{'✓' if right else '✗'} {similarity:.2f}</figcaption></figure>"
            for image, right, similarity in zip(
                images, art["found_images_right"][q], art["found_images_similarity"][q], strict=True
            )
        )
        cards.append(
            f'<div class="row" style="--n:{len(images)}"><div class="query">'
            f"{escape(str(art['asked_captions'][q]))}</div>{figures}</div>"
        )
    return block(
        "Each caption, then the pictures nearest to it. ✓ in a solid frame: the picture has this "
        "caption.",
        cards,
    )


def _chains(run: Run, rows: int) -> str:
    art = run.artifacts
    if "chain_held_captions" not in art:
        return ""
    cards = [
        f'<div class="told"><figure>{picture(image, own)}</figure>'
        f"<div><b>{escape(own)}</b><p>holds: {escape(str(held))}</p></div>"
        f"<figure>{picture(other, 'picture the chain of the caption holds')}</figure></div>"
        for image, own, held, other in zip(
            art["chain_images"][:rows],
            (str(text) for text in art["chain_captions"][:rows]),
            art["chain_held_captions"][:rows],
            art["chain_held_images"][:rows],
            strict=True,
        )
    ]
    return block(
        "Each training picture with a caption, the caption that the picture’s chain holds as a "
        "negative, and (right) the picture that the caption’s chain holds.",
        cards,
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
