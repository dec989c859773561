"""A retriever tuned with every method: equal steps, equal time, many runs on a GPU.

    PYTHONPATH=src python benchmarks/retrieval.py BEIR_FOLDER MODEL_FOLDER [--batches 4 16 64]
        [--elsewhere BEIR_FOLDER ...] [--resume FILE] [--alone] [--equal-time METHOD] [--show]

Every method is tuned on validation queries alone (a fifth of the training queries, those that
`negchain train` holds out): beta and learning rate, seed 0. Test queries are only reported. A step
encodes three documents per query with gradient, the positive and two more; in-batch and GIST encode
the positive alone, and CachedMNRL is a batch of 256 for as many steps (its gradient is that of the
batch in one piece, which fits here). Stale tables refresh 1 % of the corpus a step besides. On a
GPU the step of every method is a CUDA graph, as that of `negchain train` is: eager steps of so
small a model are launches, whose time differs by a third from run to run.
benchmarks/many_runs.py has slices, resuming and the tables; rows go to $OUT/retrieval.jsonl.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import many_runs
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from negchain.methods import LossSettings, named
from negchain.tasks.beir import read_beir

LENGTH = 256  # tokens
LARGE = 256  # the batch of CachedMNRL
WARM_UP = 3  # eager steps before the graph: libraries initialise and allocate
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = {  # methods of the package, built as `negchain train` builds them
    "random": "infonce",
    "table top-k": "topk",
    "logQ uniform": "logq",
    "sogclr": "sogclr",
    "emc2 uniform": "emc2",
    "emc2 informed": "emc2-informed",
    "informed importance": "informed",
}
THEIRS = ("in-batch", "CachedMNRL 256", "GIST", "mined")
METHODS = ("informed importance", "table top-k", "mined", *THEIRS[:3], *OURS)


# ------------------------------------------------------------------------------ data and encoder


class Texts:
    """Token ids of many texts on the device; places in memory get the longest of them as length."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        found = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True)
        self.ids = torch.tensor(found["input_ids"], device=DEVICE)
        self.mask = torch.tensor(found["attention_mask"], device=DEVICE)
        self.lengths = self.mask.sum(1).cpu()

    def __getitem__(self, at: Tensor) -> dict[str, Tensor]:
        longest = None if at.is_cuda else int(self.lengths[at].max())
        at = at.to(DEVICE)
        return {"input_ids": self.ids[at, :longest], "attention_mask": self.mask[at, :longest]}


@cache
def load(folder: str, model_folder: str) -> dict[str, Any]:
    """Tokens and relevance of a BEIR folder, as `negchain train` splits it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = read_beir(Path(folder), holdout=0.2)
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        "documents": Texts(tokenizer, data.documents),
        "queries": {n: Texts(tokenizer, s.texts) for n, s in splits.items() if len(s)},
        "relevant": {n: [list(graded) for graded in s.relevant] for n, s in splits.items()},
        "known": data.known,  # a query's positives and their copies
    }


class Encoder(torch.nn.Module):
    """A transformer with mean pooling: what sentence-transformers makes of this folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.encodes = {True: 0, False: 0}  # documents, with gradient and without

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].float()
        return normalize((hidden.float() * mask).sum(1) / mask.sum(1), dim=1)

    def documents(self, texts: Texts, ids: Tensor) -> Tensor:
        self.encodes[torch.is_grad_enabled()] += len(ids)
        return self(texts[ids])


@cache
def _built(folder: str) -> tuple[Encoder, dict[str, Tensor]]:
    encoder = Encoder(folder).to(DEVICE)
    return encoder, {name: value.clone() for name, value in encoder.state_dict().items()}


def fresh(folder: str) -> Encoder:
    """The untuned encoder; one object in a process."""
    encoder, start = _built(folder)
    encoder.load_state_dict(start)
    encoder.zero_grad(set_to_none=True)
    return encoder


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


def judge(
    encoder: Encoder, data: dict[str, Any], splits: tuple[str, ...]
) -> dict[str, list[float]]:
    """nDCG@10 of every query of some splits."""
    encoder.eval()
    table = all_of(encoder, data["documents"])
    found = {}
    for split in splits:
        queries = all_of(encoder, data["queries"][split])
        found[split] = ndcg(queries @ table.T, data["relevant"][split])
    return found


# ------------------------------------------------------------------------------ methods


class Plain:
    """Softmax over the batch's positives and further columns: what people use now."""

    def __init__(self, method: str, data: dict[str, Any], encoder: Encoder, beta: float) -> None:
        self.method, self.data, self.encoder, self.beta = method, data, encoder, beta
        if method in ("GIST", "mined"):  # the guide is the untuned encoder
            encoder.eval()
            self.guide = (
                all_of(encoder, data["queries"]["train"]),
                all_of(encoder, data["documents"]),
            )
        if method == "mined":
            self.pool = self._mined()

    def _mined(self) -> Tensor:
        """The 30 nearest below 95 % of the positive's score (TopK-PercPos), per query."""
        scores = self.guide[0] @ self.guide[1].T
        rows = zip(self.data["relevant"]["train"], self.data["known"], strict=True)
        for row, (own, known) in enumerate(rows):
            scores[row, scores[row] > 0.95 * scores[row, own].max()] = -2.0
            scores[row, known] = -2.0
        return scores.topk(30, dim=1).indices

    def __call__(
        self, q: Tensor, chosen: Tensor, index: Tensor, known: Tensor, at: Tensor
    ) -> Tensor:
        ids = chosen
        if self.method == "mined":
            ids = torch.cat([chosen, self.pool[index].gather(1, at).flatten()])
        logits = self.beta * q @ self.encoder.documents(self.data["documents"], ids).T
        drop = (ids[None, :, None] == known[:, None, :]).any(2)
        if self.method == "GIST":
            by_guide = self.guide[0][index] @ self.guide[1][ids].T
            drop |= by_guide > by_guide.diagonal()[:, None]
        own = torch.arange(len(q), device=DEVICE)
        drop &= own[:, None] != torch.arange(len(ids), device=DEVICE)
        return cross_entropy(logits.masked_fill(drop, -math.inf), own)


class Ours:
    """A loss of the package over the whole corpus."""

    def __init__(self, method: str, data: dict[str, Any], encoder: Encoder, task: dict[str, Any]):
        self.data, self.encoder = data, encoder
        draws = {"draws": 2 * task["batch"], "k": 2, "share": 0.9, "sharpness": 0.5}
        count, documents = len(data["known"]), len(data["documents"].lengths)
        layout = {"views": "paired", "symmetric": False, "num_keys": documents}
        dim = encoder.model.config.hidden_size
        settings = LossSettings(
            count, task["beta"], dim, task["seed"], "all", options=draws, layout=layout
        )
        self.loss_fn = named(OURS[method]).build(settings).to(DEVICE)
        shares = torch.zeros(documents, dtype=torch.float64)
        for own in data["relevant"]["train"]:
            shares[own] += 1 / len(own)  # a step takes one of them
        self.loss_fn.give_key_counts(shares)
        with torch.no_grad():
            self.loss_fn.fill(self._documents)

    def _documents(self, ids: Tensor) -> Tensor:
        return self.encoder.documents(self.data["documents"], ids)

    def __call__(
        self, q: Tensor, chosen: Tensor, index: Tensor, known: Tensor, at: Tensor
    ) -> Tensor:
        told = {"key_index": chosen, "known": known}
        first = self.loss_fn.request(index, **told)
        second = self.loss_fn.request(index, q, **told)  # what the queries draw
        wants = [*first.wants, *second.wants]
        trained = [chosen, *(want.ids for want in wants if want.gradient)]
        parts = iter(
            torch.split(self._documents(torch.cat(trained)), [len(ids) for ids in trained])
        )
        d, answers = next(parts), list[Tensor]()
        for want in wants:  # positives, carried and drawn documents were one pass, as in a run
            with torch.no_grad():
                answers.append(next(parts) if want.gradient else self._documents(want.ids))
        first.answer(answers[: len(first.wants)])
        second.answer(answers[len(first.wants) :])
        return self.loss_fn(q, d, index, first, second, **told)  # type: ignore[no-any-return]


def recorded(step: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
    """A step as a CUDA graph, recorded on the stream its eager steps had."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One run: settings in, validation and test nDCG@10 out."""
    begin = time.perf_counter()
    try:
        numbers = _train(task)
    except Exception:
        numbers = {"error": traceback.format_exc()[-700:]}
    return {**task, **numbers, "wall": round(time.perf_counter() - begin, 1)}


def _train(task: dict[str, Any]) -> dict[str, Any]:
    method, size, seed = task["method"], task["batch"], task["seed"]
    data = load(task["data"], task["model"])
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    encoder = fresh(task["model"])
    queries, relevant = data["queries"]["train"], data["relevant"]["train"]
    count, width = len(relevant), max(map(len, data["known"]))
    known = torch.tensor([r + [-1] * (width - len(r)) for r in data["known"]], device=DEVICE)
    steps = round(task["epochs"] * (count // size or 1) * task.get("scale", 1.0))
    shown = min(LARGE, count) if method == "CachedMNRL 256" else size
    if method in OURS:
        loss_of: Any = Ours(method, data, encoder, task)
    else:
        loss_of = Plain(method, data, encoder, task["beta"])
    encoder.train()
    lr = torch.zeros((), device=DEVICE)  # a tensor, which a graph reads at every step
    on_gpu = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(encoder.parameters(), lr, fused=on_gpu, capturable=on_gpu)
    epochs = math.ceil(steps * shown / count) + 1
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    inputs = torch.zeros(4, shown, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        encoder.encodes = {True: 0, False: 0}
        index, chosen, at = inputs[0], inputs[1], inputs[2:].T
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(encoder(queries[index]), chosen, index, known[index], at)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()

    alone, times, run = task.get("stage") == "alone", [], step
    stream = torch.cuda.Stream() if on_gpu else None
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    started = time.perf_counter()
    for number in range(min(steps, 60) if alone else steps):
        if alone:
            wait()
        times.append(time.perf_counter())
        rows = order[number * shown : (number + 1) * shown]
        chosen = [relevant[i][rng.integers(len(relevant[i]))] for i in rows]
        at = rng.integers(30, size=(2, shown))  # of the mined
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # None: as it is
            inputs.copy_(torch.from_numpy(np.stack([rows, chosen, *at])), non_blocking=True)
            lr.fill_(task["lr"] * min((number + 1) / (0.1 * steps), 1.0) * (1 - number / steps))
            if stream is not None and number == WARM_UP:
                run = recorded(step, stream)
            run()
    wait()
    done = {"steps": steps, "seconds": round(time.perf_counter() - started, 1)}
    done |= {"encodes": encoder.encodes[True], "refreshed": encoder.encodes[False]}
    if alone:
        later = times[len(times) // 2 :]
        laps = [b - a for a, b in zip(later, later[1:], strict=False)]
        return {**done, "ms": 1000 * statistics.median(laps)}
    found = judge(encoder, data, ("validation", "test"))
    done |= {split: round(float(np.mean(v)), 4) for split, v in found.items()}
    for folder in task["elsewhere"]:
        there = judge(encoder, load(folder, task["model"]), ("test",))["test"]
        done[Path(folder).name] = round(float(np.mean(there)), 4)
    return {**done, "per_query": [round(v, 4) for v in found["test"]]}


def zero_shot(folders: list[str], model: str) -> None:
    """Print what the untuned encoder gets."""
    encoder = Encoder(model).to(DEVICE)
    for folder in folders:
        data = load(folder, model)
        splits = tuple(name for name in ("validation", "test") if name in data["queries"])
        found = judge(encoder, data, splits)
        print(
            f"zero-shot, {Path(folder).name}:",
            {n: round(float(np.mean(v)), 4) for n, v in found.items()},
        )


def main() -> None:
    parser = many_runs.options(__doc__ or "")
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--elsewhere", nargs="*", default=[], help="judged on their test queries")
    methods = list(dict.fromkeys(METHODS))
    parser.set_defaults(batches=[16, 64, 4], methods=methods, against="informed importance")
    parser.set_defaults(betas=[20.0, 50.0], lrs=[2e-5, 5e-5])
    given = parser.parse_intermixed_args()
    names = ("data", "model", "epochs", "elsewhere")
    fixed = {name: getattr(given, name) for name in names}
    rows = many_runs.run(train, given, fixed, "retrieval.jsonl")
    many_runs.show(rows, given, ["encodes", "refreshed", *(Path(f).name for f in given.elsewhere)])
    if not given.show:
        zero_shot([given.data, *given.elsewhere], given.model)


if __name__ == "__main__":
    main()
