"""Pairs of texts by position, as the losses need them.

Each different text has one position, so equal texts share it: neither is ever a negative of the
other. The positions of a row stand in its label column.

Shapes: `L` known positives per anchor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

LABEL = "label"
CHECKED = 100  # rows of a training set whose texts are compared with their positions


@dataclass(frozen=True)
class Pairs:
    """A data set of pairs by position; `index_pairs` makes it."""

    dataset: Dataset  # with a label column [anchor, key, hard negatives' keys ...]
    anchors: list[str]  # text of every anchor position
    keys: list[str]  # text of every key position: the corpus
    known: Tensor | None  # [anchors, L] positives and equals of each anchor, padded with -1

    def positions(self) -> list[list[int]]:
        """(anchor, key) of every row."""
        return [label[:2] for label in self.dataset.with_format(None)[LABEL][:]]

    def check(self, dataset: Iterable[dict[str, Any]]) -> None:
        """Refuse a data set whose first rows hold other texts than their positions name."""
        for number, row in enumerate(islice(dataset, CHECKED)):
            texts = [row[name] for name in text_columns(row)]
            label = row.get(LABEL, ())  # anything, where it is somebody else's
            label = np.ravel(label.cpu() if isinstance(label, Tensor) else label).tolist()
            towers = [self.anchors, *[self.keys] * len(label)]
            named = [
                own[at] if isinstance(at, int) and 0 <= at < len(own) else None
                for own, at in zip(towers, label, strict=False)
            ]
            if label and texts != named[: max(2, len(texts))]:
                raise ValueError(
                    f"row {number} of the training set holds {texts!r:.200}, and its '{LABEL}' "
                    f"names {named!r:.200}; train on the .dataset of the index_pairs that the "
                    "loss was built with (rows may be left out or shuffled; no column is added, "
                    "and they stay in order)"
                )


def index_pairs(dataset: Dataset, corpus: Iterable[str] = ()) -> Pairs:
    """Give every text a position: of anchors (first column), or of keys (all other columns).

    The second column holds positives, the others hard negatives. A key that is an anchor's own text
    (in pairs of equal questions, say) is known to be no negative of it, as its positives are.

    Args:
        dataset: of texts, one pair a row; rows with the same anchor are its several positives.
        corpus: further documents that may be proposed as negatives; they get the first positions.

    Example:
        >>> rows = {"query": ["a", "b", "a"], "answer": ["A", "B", "A2"]}
        >>> pairs = index_pairs(Dataset.from_dict(rows), corpus=["C", "A"])
        >>> pairs.keys, pairs.dataset["label"][:]
        (['C', 'A', 'B', 'A2'], [[0, 1], [1, 2], [0, 3]])
        >>> pairs.known
        tensor([[ 1,  3],
                [ 2, -1]])
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            "every text needs a position before training, so index_pairs takes a datasets.Dataset, "
            f"got {type(dataset).__name__}; load an iterable one whole (Dataset.from_list), index "
            "each set of a DatasetDict by itself"
        )
    if len(dataset) == 0:
        raise ValueError("the data set must hold at least one pair, got none")
    columns = dataset[:]  # not one by one: a transform may need them all, and rename them
    if LABEL in dataset.column_names or len(columns) < 2:
        raise ValueError(
            "the data set must hold texts: an anchor, a positive and maybe hard negatives, and no "
            f"'{LABEL}' (positions go there), got {list(columns)}; remove or rename columns"
        )
    documents: list[Any] = [corpus] if isinstance(corpus, (str, Mapping)) else list(corpus)
    for name, texts in [*columns.items(), ("corpus=", documents)]:
        wrong = next(
            (number for number, text in enumerate(texts) if not isinstance(text, str)), None
        )
        if wrong is not None:
            raise ValueError(
                f"every column and corpus= must hold texts, but row {wrong} of '{name}' is "
                f"{texts[wrong]!r:.50}; remove the column or leave out such rows, and of a corpus "
                "give the texts alone"
            )
    keys = {text: number for number, text in enumerate(dict.fromkeys(documents))}
    anchors: dict[str, int] = {}
    positives: list[dict[int, None]] = []
    labels = []
    for row in zip(*columns.values(), strict=True):
        anchor = anchors.setdefault(row[0], len(anchors))
        label = [anchor, *(keys.setdefault(text, len(keys)) for text in row[1:])]
        positives += [{}] if anchor == len(positives) else []
        positives[anchor][label[1]] = None
        labels.append(label)
    for text, own in zip(anchors, positives, strict=True):
        if text in keys:
            own[keys[text]] = None
    known = padded(positives) if max(map(len, positives)) > 1 else None
    return Pairs(dataset.add_column(LABEL, labels), list(anchors), list(keys), known)


def text_columns(row: dict[str, Any]) -> list[str]:
    """Names of a row's texts, as the collator sees them: a transform may have made them.

    >>> text_columns({"query": "a", "answer": "A", "label": [0, 0], "dataset_name": "one"})
    ['query', 'answer']
    """
    return [name for name in row if name not in (LABEL, "dataset_name")]


def padded(rows: Sequence[Collection[int]]) -> Tensor:  # [B, L]
    """Positions of each row in one tensor, padded with -1."""
    longest = max(map(len, rows))
    return torch.tensor([[*own, *[-1] * (longest - len(own))] for own in rows])
