"""What the report shows of retrievers: rankings of held-out queries, and what is proposed."""

from html import escape
from typing import Any

from .galleries import block, kept
from .measures import Metric, Shown
from .runs import Run

_NAMES = {
    "ndcg10": ("nDCG@10", "Relevant documents among the first ten, early ones count more"),
    "mrr10": ("MRR@10", "One over the rank of the first relevant document"),
    "recall10": ("Recall@10", "Share of the relevant documents among the first ten"),
    "recall100": ("Recall@100", "Share of the relevant documents among the first hundred"),
}


def _metric(key: str, split: str) -> Metric:
    name, note = _NAMES[key]
    prefix = "test_" if split == "test" else ""
    return Metric(f"{prefix}{key}", f"{name}, {split}", "percent", note, True, f"{split} {name}")


VALIDATION = [_metric(key, "validation") for key in _NAMES]
TEST = [_metric(key, "test") for key in _NAMES]


def proposals(run: Run, *, rows: int) -> str:
    """Training queries, their positive, and the hardest documents beside it; "" without any."""
    # how far the hardest proposal is above the positive: false negatives come first
    names = ("queries", "positives", "positive_scores", "texts", "scores")
    asked = kept(run, None, *(f"proposal_{name}" for name in names))
    asked.sort(key=lambda entry: entry[2] - entry[4].max())
    count, blocks = sum(scores.max() > own for _, _, own, _, scores in asked), []
    for query, positive, own, texts, scores in asked[:rows]:
        others = [
            _document(text, score, "above" if score > own else "")
            for text, score in zip(texts, scores, strict=True)
            if score > -1.5  # else it is one of its positives
        ]
        blocks.append(
            f'<article class="card"><h3>{escape(str(query))}</h3>'
            '<table class="settings proposals"><tbody>'
            f"{_document(positive, own, 'own')}{''.join(others)}</tbody></table></article>"
        )
    have = "has one, and comes" if count == 1 else "have one, and come"
    return block(
        "Training queries, the positive of each (✓), and the other documents that the encoder "
        "ranks highest, with the cosine: the hardest negatives there are. Read them: a text that "
        "answers the query is a false negative, and where many do, hard negatives gain nothing or "
        f"harm. ↑ marks those above the positive: {count} of the {len(asked)} queries looked at "
        f"{have} first.",
        blocks,
        "grid wide",
    )


def _document(text: Any, score: Any, kind: str) -> str:
    mark = {"own": "✓", "above": "↑", "": ""}[kind]
    look = f' class="{kind}"' if kind else ""
    return f"<tr{look}><th>{mark} {float(score):.2f}</th><td>{escape(str(text))}</td></tr>"


SHOWN = Shown(
    noun="queries",
    tested="held-out queries",
    lead=(VALIDATION[0], TEST[0]),
    secondary=(*VALIDATION[1:], *TEST[1:]),
    columns=(VALIDATION[0], TEST[0], TEST[1], TEST[3]),
    baselines={"untrained": "Zero-shot encoder"},
    explained="Settings and epoch are chosen on validation queries; test queries only report. "
    "Zero-shot encoder: as it was before the first step.",
    pictures=lambda run, small: [
        ("The hardest negatives", proposals(run, rows=3 if small else 12), None)
    ],
)
