"""What a retriever is judged by: nDCG@10, MRR@10 and recall of held-out queries.

The definitions are sentence-transformers' (`InformationRetrievalEvaluator`): a grade above 0 counts
as relevant, and every other document as not, copies of relevant ones included.

Shapes: `Q` queries, `N` documents, `D` embedding, `P` proposals shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from negchain.tasks.beir import Graded
from negchain.tasks.task import SPLITS, Arrays, Judge, Numbers, evenly
from negchain.tasks.text import PASS, TextEncoder, Texts

if TYPE_CHECKING:
    from negchain.tasks.retrieval import RetrievalTask

SHOWN, PROPOSED, LETTERS = 12, 4, 400  # training queries in the report, texts of each, their length
CPU_PASS = 32  # texts encoded at a time without a GPU, so that progress moves


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[:LETTERS].rsplit(' ', 1)[0]}…"


class RetrievalJudge(Judge):
    """Ranks all documents for validation queries; at start and end for test queries too."""

    task: RetrievalTask
    best_by = "ndcg10"  # of validation queries, never of test queries

    def quick(self, encoder: TextEncoder) -> Numbers:
        """Of validation queries: `ndcg10`, `mrr10`, `recall10`, `recall100`."""
        documents = self.embed(encoder, self.task.documents)
        return _means(self._answers(encoder, documents, ["validation"]))

    def thorough(self, encoder: TextEncoder) -> tuple[Numbers, Arrays]:
        """The same, and of test queries with `test_` before the name; what each query got.

        And what a few training queries would be offered as negatives.
        """
        documents = self.embed(encoder, self.task.documents)
        answers = self._answers(encoder, documents, list(SPLITS))
        arrays: Arrays = {f"right_{name}": values for name, values in answers.items()}
        arrays["test_labels"] = np.frombuffer(self.task.data.held.encode(), np.uint8)
        return _means(answers), arrays | self._proposals(encoder, documents)

    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """The numbers of the encoder before its first step."""
        names = [prefix + name for prefix in SPLITS.values() for name in MEASURES]
        return {f"untrained_{name}": line[name] for name in names if name in line}

    def embed(self, encoder: TextEncoder, texts: Texts) -> Tensor:  # -> [N, D]
        """Unit embeddings of all texts, those of similar length together."""
        device, order = self.task.device, texts.lengths.argsort(stable=True)
        parts, done = list[Tensor](), 0
        with self.judged(encoder):
            for places in torch.split(order, PASS if device.type == "cuda" else CPU_PASS):
                parts.append(encoder(texts.tokens(places, device)).float())
                done += len(places)
                self.told(f"{done:,}/{len(texts):,} texts")
        z = torch.cat(parts)
        unit = torch.empty_like(z)
        unit[order.to(device)] = torch.nn.functional.normalize(z, dim=-1)
        return unit

    def _proposals(self, encoder: TextEncoder, documents: Tensor) -> Arrays:
        """What this encoder ranks highest for a few training queries, beside known positives.

        Not by the loss's table: the encoder that is kept may be older than what the table holds.
        """
        task, data = self.task, self.task.data
        if not len(data.train):
            return {}
        places = evenly(len(data.train), SHOWN)
        chosen = places.tolist()
        with self.judged(encoder):
            z = encoder(task.queries["train"].tokens(places, task.device)).float()
        scores = (torch.nn.functional.normalize(z, dim=-1) @ documents.T).cpu()
        best = [max(data.train.relevant[n].items(), key=lambda pair: pair[1])[0] for n in chosen]
        positive = scores[range(len(chosen)), best]
        known = task.known[chosen].cpu()
        for row, own in zip(scores, known, strict=True):
            row[own[own >= 0]] = -2.0  # below every cosine
        top = scores.topk(min(PROPOSED, scores.shape[1]))
        texts = [[_short(data.documents[d]) for d in row] for row in top.indices.tolist()]
        return {
            "proposal_queries": np.array([_short(data.train.texts[n]) for n in chosen]),
            "proposal_positives": np.array([_short(data.documents[d]) for d in best]),
            "proposal_positive_scores": positive.numpy(),
            "proposal_texts": np.array(texts),  # [Q, P]
            "proposal_scores": top.values.numpy(),
        }

    def _answers(self, encoder: TextEncoder, documents: Tensor, splits: Sequence[str]) -> Arrays:
        """Every measure of every query, [Q] each."""
        task = self.task
        found: Arrays = {}
        for split in splits:
            queries = getattr(task.data, split)
            if len(queries):
                z = self.embed(encoder, task.queries[split])
                ranked = measured(z, documents, queries.relevant)
                found |= {SPLITS[split] + name: values for name, values in ranked.items()}
        return found


MEASURES = {
    "ndcg10": ("ndcg@k", 10),
    "mrr10": ("mrr@k", 10),
    "recall10": ("recall@k", 10),
    "recall100": ("recall@k", 100),
}


def measured(queries: Tensor, documents: Tensor, relevant: Sequence[Graded]) -> Arrays:
    """Measures of every query by sentence-transformers' evaluator, from unit embeddings."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    class PerQuery(InformationRetrievalEvaluator):  # type: ignore[misc]
        """Hands over embeddings instead of computing them, and keeps each query's numbers."""

        def embed_inputs(self, model: Any, *given: Any, **named: Any) -> Any:
            return model

        def compute_metrics(self, queries_result_list: list[Any]) -> Any:
            alone: Any = copy(self)
            self.single = []
            for name, hits in zip(self.queries_ids, queries_result_list, strict=True):
                alone.queries_ids = alone.queries = [name]
                self.single.append(InformationRetrievalEvaluator.compute_metrics(alone, [hits]))
            return {k: {} for k in ("accuracy@k", "precision@k", "recall@k", "mrr@k", "ndcg@k",
                                    "map@k")}  # fmt: skip

    names = [str(n) for n in range(len(documents))]
    evaluator = PerQuery(
        {str(n): "" for n in range(len(queries))},
        dict.fromkeys(names, ""),
        {str(n): {names[d] for d in graded} for n, graded in enumerate(relevant)},
        accuracy_at_k=[10],
        precision_recall_at_k=[10, 100],
        map_at_k=[10],
        score_functions={"cosine": lambda a, b: a @ b.T},
    )
    evaluator.compute_metrices(queries, corpus_embeddings=documents)
    return {
        name: np.array([float(one[kind][k]) for one in evaluator.single])
        for name, (kind, k) in MEASURES.items()
    }


def _means(answers: Arrays) -> Numbers:
    return {name: float(values.mean()) for name, values in answers.items()}
