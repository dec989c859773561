"""Dense retrieval tuned with every method, equal document encodes per step, many runs on a GPU.

    PYTHONPATH=src python benchmarks/retrieval.py BEIR_FOLDER MODEL_FOLDER [--batches 4 16]
        [--seeds 3] [--epochs 6] [--at-once 8] [--seconds 400] [--methods ...]

Every method is tuned on validation queries alone (a fifth of the training queries; beta and
learning rate, seed 0); the other seeds run with what was chosen, and test queries are only
reported. A step encodes three documents per query: the positive and two more (in-batch: the
positive only). Writes retrieval.jsonl into $OUT, one line per run, with nDCG@10 of every test
query for paired tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH = 256  # tokens
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ------------------------------------------------------------------------------ data and encoder


def _lines(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        return [json.loads(line) for line in file]


class Texts:
    """Token ids of many texts on the device, cut to the longest of those asked for."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        found = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True)
        self.ids = torch.tensor(found["input_ids"], device=DEVICE)
        self.mask = torch.tensor(found["attention_mask"], device=DEVICE)
        self.lengths = self.mask.sum(1).cpu()

    def __getitem__(self, at: Tensor) -> dict[str, Tensor]:
        longest = int(self.lengths[at.cpu()].max())
        at = at.to(DEVICE)
        return {"input_ids": self.ids[at, :longest], "attention_mask": self.mask[at, :longest]}


@cache
def load(folder: str, model_folder: str) -> dict[str, Any]:
    """Texts and relevance of a BEIR folder; ids are positions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    corpus = next(Path(folder).glob("corpus.jsonl*"))
    documents = _lines(corpus)
    place = {d["_id"]: n for n, d in enumerate(documents)}
    queries = {q["_id"]: q["text"] for q in _lines(Path(folder) / "queries.jsonl")}
    relevant: dict[str, dict[str, list[int]]] = {}
    for split in ("train", "test"):
        relevant[split] = {}
        path = Path(folder) / "qrels" / f"{split}.tsv"
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            query, document, score = line.split("\t")
            if int(score) > 0 and document in place and query in queries:
                relevant[split].setdefault(query, []).append(place[document])
    names = {split: sorted(found) for split, found in relevant.items()}
    order = np.random.default_rng(0).permutation(len(names["train"]))
    held = set(order[: len(order) // 5].tolist())
    splits = {
        "train": [q for n, q in enumerate(names["train"]) if n not in held],
        "validation": [q for n, q in enumerate(names["train"]) if n in held],
        "test": names["test"],
    }
    every = {**relevant["train"], **relevant["test"]}
    text = [(d.get("title", "") + " " + d["text"]).strip() for d in documents]
    first: dict[str, int] = {}
    same = torch.tensor([first.setdefault(t, n) for n, t in enumerate(text)])
    return {
        "documents": Texts(tokenizer, text),
        "queries": {
            s: Texts(tokenizer, [queries[q] for q in qs]) for s, qs in splits.items() if qs
        },
        "relevant": {s: [every[q] for q in qs] for s, qs in splits.items()},
        "copies": bool((same != torch.arange(len(same))).sum()),
    }


class Encoder(torch.nn.Module):
    """A transformer with mean pooling: what sentence-transformers makes of this folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].float()
        return torch.nn.functional.normalize((hidden.float() * mask).sum(1) / mask.sum(1), dim=1)


@torch.no_grad()
def all_of(encoder: Encoder, texts: Texts, chunk: int = 512) -> Tensor:
    """Embeddings of every text, in order; similar lengths together."""
    order = texts.lengths.argsort()
    found = [encoder(texts[part]) for part in order.split(chunk)]
    out = torch.empty(len(order), found[0].shape[1], device=DEVICE)
    out[order.to(DEVICE)] = torch.cat(found)
    return out


def ndcg(scores: Tensor, relevant: list[list[int]], k: int = 10) -> list[float]:
    """nDCG@k of every query, binary relevance."""
    top = scores.topk(k, dim=1).indices.tolist()
    found = []
    for ranked, own in zip(top, relevant, strict=True):
        gain = sum(1 / math.log2(n + 2) for n, d in enumerate(ranked) if d in own)
        found.append(gain / sum(1 / math.log2(n + 2) for n in range(min(len(own), k))))
    return found


# ------------------------------------------------------------------------------ methods


def with_columns(
    q: Tensor, d: Tensor, own: Tensor, ids: Tensor, known: Tensor, beta: float, drop: Tensor | None
) -> Tensor:
    """Softmax over the batch's positives and more columns, known positives left out."""
    logits = beta * q @ d.T
    same = (ids[None, :, None] == known[:, None, :]).any(2)
    column = torch.arange(len(q), device=q.device)
    same[column, column] = False
    logits = logits.masked_fill(same, -math.inf)
    if drop is not None:
        logits = logits.masked_fill(drop, -math.inf)
    return torch.nn.functional.cross_entropy(logits, own)


def library(name: str, size: int, queries: int, documents: int, beta: float, dim: int) -> Any:
    """A loss of ours for a corpus, two documents beyond the positive per query and step."""
    import negchain as nc

    more = {"views": "paired", "num_keys": documents, "denominator": "all", "seed": 0}
    informed = {"share": 0.9, "sharpness": 0.5}
    builds: dict[str, Callable[[], Any]] = {
        "random": lambda: nc.InfoNCELoss(
            queries, beta, proposals=nc.Uniform(2 * size), **_less(more)
        ),
        "sogclr": lambda: nc.SogCLRLoss(queries, beta, proposals=nc.Uniform(2 * size), **more),
        "emc2": lambda: nc.EMC2Loss(queries, beta, proposals=nc.Uniform(size), **more),
        "emc2 fresh partition": lambda: nc.EMC2Loss(
            queries, beta, proposals=nc.Uniform(size), partition_rate=1.0, **more
        ),
        "emc2 fast partition": lambda: nc.EMC2Loss(
            queries, beta, proposals=nc.Uniform(size), partition_rate=0.3, **more
        ),
        "isir": lambda: nc.EMC2Loss(
            queries, beta, kernel="isir", proposals=nc.Uniform(size), **more
        ),
        "emc2 informed": lambda: nc.EMC2Loss(
            queries, beta, proposals=nc.Informed(size, **informed), dim=dim, **more
        ),
        "informed importance": lambda: nc.ImportanceLoss(
            queries, beta, nc.Informed(2 * size, **informed, alone=True), dim=dim, **more
        ),
        "importance half": lambda: nc.ImportanceLoss(
            queries, beta, nc.Informed(2 * size, share=0.5, alone=True), dim=dim, **more
        ),
    }
    return builds[name]()


def _less(more: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in more.items() if k != "denominator"}


OURS = [
    "emc2 fresh partition",
    "emc2 fast partition",
    "random",
    "sogclr",
    "emc2",
    "isir",
    "emc2 informed",
    "informed importance",
    "importance half",
]
THEIRS = ["in-batch", "in-batch 256", "GIST", "mined", "table top 20"]


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One run: settings in, validation and test nDCG@10 out."""
    method, size, seed = task["method"], task["batch"], task["seed"]
    beta, lr, begin = task["beta"], task["lr"], time.perf_counter()
    try:
        data = load(task["data"], task["model"])
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        encoder = Encoder(task["model"]).to(DEVICE)
        documents, queries = data["documents"], data["queries"]["train"]
        relevant = data["relevant"]["train"]
        count, width = len(relevant), max(map(len, relevant))
        known = torch.tensor([r + [-1] * (width - len(r)) for r in relevant], device=DEVICE)
        num_documents = len(documents.lengths)
        table = guide_q = None
        pool: Tensor | None = None
        if method in ("GIST", "mined", "table top 20"):
            table = all_of(encoder, documents)
            guide_q = all_of(encoder, queries)
        if method == "mined":
            pool = _mined(guide_q, table, relevant)
        loss_fn = None
        encoder.train()
        if method in OURS:
            loss_fn = library(method, size, count, num_documents, beta, 384).to(DEVICE)
            with torch.no_grad():
                loss_fn.fill(lambda ids: encoder(documents[ids]))
        step_size = 256 if method == "in-batch 256" else size
        steps = task["epochs"] * (count // step_size or 1)
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=lr, fused=DEVICE.type == "cuda")
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / (0.1 * steps), 1.0) * (1 - n / steps)
        )
        order = np.concatenate([rng.permutation(count) for _ in range(task["epochs"] + 1)])
        cursor = 0
        started = time.perf_counter()
        for step in range(steps):
            index = order[step * step_size : (step + 1) * step_size]
            chosen = torch.tensor([relevant[i][rng.integers(len(relevant[i]))] for i in index])
            index = torch.from_numpy(index).to(DEVICE)
            chosen = chosen.to(DEVICE)
            q = encoder(queries[index])
            if loss_fn is not None:
                d = encoder(documents[chosen])
                loss = loss_fn(
                    q,
                    d,
                    index,
                    key_index=chosen,
                    known=known[index],
                    encode=(lambda i: encoder(queries[i]), lambda i: encoder(documents[i])),
                )
            else:
                extra = chosen[:0]
                if pool is not None:
                    at = torch.from_numpy(rng.integers(pool.shape[1], size=(len(index), 2)))
                    extra = pool[index].gather(1, at.to(DEVICE)).flatten()
                elif method == "table top 20":
                    scores = (q.detach() @ table.T).scatter(1, known[index].clamp(min=0), -2.0)
                    top = scores.topk(20, dim=1).indices
                    at = torch.from_numpy(rng.integers(20, size=(len(index), 2))).to(DEVICE)
                    extra = top.gather(1, at).flatten()
                ids = torch.cat([chosen, extra])
                d = encoder(documents[ids])
                drop = None
                if method == "GIST":
                    by_guide = guide_q[index] @ table[ids].T
                    own_score = by_guide.diagonal()[:, None]
                    drop = by_guide > own_score
                own = torch.arange(len(index), device=DEVICE)
                loss = with_columns(q, d, own, ids, known[index], beta, drop)
                if method == "table top 20":
                    table[ids] = d.detach()
                    due = (
                        cursor + torch.arange(num_documents // 100 + 1, device=DEVICE)
                    ) % num_documents
                    cursor += len(due)
                    with torch.no_grad():
                        table[due] = encoder(documents[due])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        seconds = time.perf_counter() - started
        found = judge(encoder, data)
        numbers: dict[str, Any] = {s: round(float(np.mean(v)), 4) for s, v in found.items()}
        numbers |= {"per_query": [round(v, 4) for v in found.get("test", [])], "steps": steps}
        numbers["seconds"] = round(seconds, 1)
    except Exception:
        numbers = {"error": traceback.format_exc()[-700:]}
    return {**task, **numbers, "wall": round(time.perf_counter() - begin, 1)}


def _mined(queries: Tensor, table: Tensor, relevant: list[list[int]]) -> Tensor:
    """Per query the 30 nearest documents below 95 % of its positive's score (TopK-PercPos)."""
    scores = queries @ table.T
    for row, own in enumerate(relevant):
        limit = 0.95 * scores[row, own].max()
        scores[row, scores[row] > limit] = -2.0
        scores[row, own] = -2.0
    return scores.topk(30, dim=1).indices


def judge(encoder: Encoder, data: dict[str, Any]) -> dict[str, list[float]]:
    """nDCG@10 of every validation and test query."""
    encoder.eval()
    table = all_of(encoder, data["documents"])
    return {
        split: ndcg(all_of(encoder, data["queries"][split]) @ table.T, data["relevant"][split])
        for split in ("validation", "test")
        if split in data["queries"]
    }


# ------------------------------------------------------------------------------ many runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--betas", type=float, nargs="+", default=[20.0, 50.0])
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-5, 5e-5])
    parser.add_argument("--methods", nargs="+", default=[*THEIRS, *OURS])
    options = parser.parse_args()
    grid = [(beta, lr) for beta in options.betas for lr in options.lrs]
    out, begin = Path(os.environ.get("OUT", ".")), time.perf_counter()
    fixed = {"data": options.data, "model": options.model, "epochs": options.epochs}
    rows: list[dict[str, Any]] = []
    pending: dict[tuple[str, int], int] = {}
    with (
        mp.get_context("spawn").Pool(options.at_once) as pool,
        open(out / "retrieval.jsonl", "w") as f,
    ):
        waiting: list[Any] = []

        def ask(**task: Any) -> None:
            waiting.append(pool.apply_async(train, ({**fixed, **task},)))

        for size in options.batches:
            for method in options.methods:
                pending[method, size] = len(grid)
                for beta, lr in grid:
                    ask(method=method, batch=size, seed=0, beta=beta, lr=lr)
        while waiting and time.perf_counter() - begin < options.seconds:
            ready = [r for r in waiting if r.ready()]
            waiting = [r for r in waiting if r not in ready]
            for row in (r.get() for r in ready):
                rows.append(row)
                f.write(json.dumps(row) + "\n")
                f.flush()
                key = row["method"], row["batch"]
                pending[key] -= 1
                if pending[key] == 0:  # tuned: the other seeds
                    tried = [r for r in rows if (r["method"], r["batch"]) == key and "test" in r]
                    if tried:
                        best = max(tried, key=lambda r: r["validation"])
                        for seed in range(1, options.seeds):
                            ask(
                                method=key[0],
                                batch=key[1],
                                seed=seed,
                                beta=best["beta"],
                                lr=best["lr"],
                            )
            time.sleep(0.2)
        pool.terminate()
    show(rows, options.batches, options.methods)
    print(f"{len(rows)} runs in {time.perf_counter() - begin:.0f} s, {len(waiting)} not finished")


def show(rows: list[dict[str, Any]], batches: list[int], methods: list[str]) -> None:
    """Test nDCG@10 with the settings validation chose, over seeds."""
    for size in batches:
        print(f"| b = {size} | beta | lr | validation | test (seeds) | s per run |")
        print("|---" * 6 + "|")
        for method in methods:
            mine = [r for r in rows if (r["method"], r["batch"]) == (method, size)]
            done = [r for r in mine if "test" in r]
            if not done:
                print(f"| {method} | | | {mine[0]['error'][-300:] if mine else 'not run'} |")
                continue
            best = max((r for r in done if r["seed"] == 0), key=lambda r: r["validation"])
            same = [r for r in done if (r["beta"], r["lr"]) == (best["beta"], best["lr"])]
            test, seconds = [r["test"] for r in same], np.mean([r["seconds"] for r in same])
            print(
                f"| {method} | {best['beta']:g} | {best['lr']:g} | "
                f"{np.mean([r['validation'] for r in same]):.3f} | {np.mean(test):.3f} "
                f"({', '.join(f'{t:.3f}' for t in test)}) | {seconds:.0f} |"
            )


if __name__ == "__main__":
    main()
