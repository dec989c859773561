"""A task and a method of one's own, in one file for `--import`: words and their corpus.

Anchors are 40 vectors, keys a corpus of 60; either has a tower of its own. A batch is loaded by
`load_ahead`, one anchor in four knows a second positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import negchain
from negchain import methods, tasks
from negchain.losses.request import Want
from negchain.report.measures import Metric, Shown
from negchain.tasks.task import Batch, Judge, Task

ANCHORS, KEYS, WIDTH = 40, 60, 6


class Towers(nn.Module):
    def __init__(self, dim: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.anchors, self.keys = nn.Linear(WIDTH, dim), nn.Linear(WIDTH, dim)
        self.temperature = nn.Parameter(torch.tensor(3.0))
        self.embedding_dim = dim
        self.encoder_config = {"dim": dim, "seed": seed}


class WordsTask(Task):
    num_samples = ANCHORS
    fingerprint = "words"
    layout = {"views": "paired", "symmetric": False, "num_keys": KEYS}
    one_pass = False
    resident = False
    notes = ("words are few",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(1)
        self.key_of = torch.randperm(KEYS, generator=generator)[:ANCHORS]
        self.keys = torch.randn(KEYS, WIDTH, generator=generator)
        noise = 0.3 * torch.randn(ANCHORS, WIDTH, generator=generator)
        self.anchors = self.keys[self.key_of].flip(1) + noise

    def info(self) -> dict[str, Any]:
        return {"test": ANCHORS}

    def build(self) -> tuple[Towers, list[str]]:
        return Towers(4, self.config.seed).to(self.device), ["two towers"]

    def towers(self, encoder: Towers) -> tuple[nn.Module, nn.Module]:
        return encoder.anchors, encoder.keys

    def beta(self, encoder: Towers) -> Tensor:
        return encoder.temperature

    def after_step(self, encoder: Towers) -> None:
        with torch.no_grad():
            encoder.temperature.clamp_(max=3.001)

    def batch(self, index: Tensor, step: Tensor) -> Batch:
        keys = self.key_of[index]
        known = torch.where(index % 4 == 0, (keys + 1) % KEYS, -1)[:, None]
        return Batch(index, keys, {"key_index": keys, "known": known})

    def inputs(self, wants: Sequence[Want], step: Tensor, row: int, loaded: Any = None) -> Tensor:
        assert len({want.tower for want in wants}) == 1  # one tower per pass
        ids = torch.cat([want.ids for want in wants])
        if wants[0].tower == "anchors" and loaded is not None:
            assert torch.equal(loaded, self.anchors[ids])
            return loaded
        return (self.anchors if wants[0].tower == "anchors" else self.keys)[ids]

    def load_ahead(self, positions: Tensor) -> Iterator[Tensor]:
        yield from self.anchors[positions]

    def judge(self) -> WordsJudge:
        return WordsJudge(self)


class WordsJudge(Judge):
    best_by = "recall1"

    @torch.no_grad()
    def quick(self, encoder: Towers) -> dict[str, float]:
        a = normalize(encoder.anchors(self.task.anchors), dim=-1)
        k = normalize(encoder.keys(self.task.keys), dim=-1)
        right = (a @ k.T).argmax(1) == self.task.key_of
        return {"recall1": right.double().mean().item()}

    def thorough(self, encoder: Towers) -> tuple[dict[str, float], dict[str, Any]]:
        return self.quick(encoder), {}

    def baselines(self, line: Mapping[str, Any]) -> dict[str, float]:
        return {"untrained_recall1": line["recall1"]}


RECALL = Metric("recall1", "Recall at 1", "percent", "The word's own key", True, "R@1")

tasks.register(
    tasks.Kind(
        "words",
        "words",
        load=lambda config, progress, encoder_config: WordsTask(config),
        rebuild=lambda described: Towers(**described),
        shown=lambda: Shown(
            "words",
            "test words",
            (RECALL,),
            columns=(RECALL,),
            pictures=lambda run, small: [("Some words", "<p>abacus</p>", None)],
        ),
        claims=lambda data: data == "dictionary",
        check=lambda config: config,
        defaults=lambda data: {
            "encoder": "towers",
            "batch_size": 8,
            "lr": 0.2,
            "warmup_epochs": 0.0,
        },
    )
)


def _soft(settings: methods.LossSettings) -> negchain.DCLLoss:
    return negchain.DCLLoss(settings.num_samples, settings.beta, **settings.layout)


methods.register(
    methods.Method("soft", "Soft DCL", ("#123456", "#654321"), _soft, denominator="negatives")
)
