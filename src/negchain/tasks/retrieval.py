"""Dense retrieval: queries and the documents that answer them, through one encoder of texts.

Anchors are training queries, keys the whole corpus. A step shows each query one of its positives,
drawn at random: one of grade 2 twice as often as one of grade 1. The other positives, and copies of
any, are never negatives (`Beir.known`).

Shapes: `Q` training queries, `B` batch, `L` known positives, `R` texts of a pass.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from negchain import methods, rng
from negchain.files import naming, real_folder
from negchain.losses.request import Want
from negchain.printable import counted
from negchain.progress import Progress
from negchain.tasks.beir import Beir, read_beir
from negchain.tasks.checks import keeps_table
from negchain.tasks.retrieval_judge import RetrievalJudge
from negchain.tasks.task import Batch, Task, judged
from negchain.tasks.text import TextEncoder, Texts, explained
from negchain.train.config import ConfigError, TrainConfig

INFORMED = {"share": 0.9, "sharpness": 0.5}
"""Of proposals from the stale table, as measured best (records/2026-11-16_scifact_h200)."""
SMALL_PASS, PADDING = 2e11, 1.25
"""When all passes are padded to the longest text of all, as a CUDA graph needs: if a pass then has
at most `SMALL_PASS` tokens times weights, or is at most `PADDING` times as long as usual. The first
is 19,000 tokens of MiniLM: on an H200 12,000 take 15 ms as a graph, and 50 to 80 without."""


class RetrievalTask(Task):
    """Queries and documents of a folder in BEIR's layout."""

    one_pass = False  # queries are short, documents long

    def __init__(self, config: TrainConfig, data: Beir, show: bool = False) -> None:
        super().__init__(config)
        self.data = data
        self.num_samples, self.fingerprint = len(data.train), data.fingerprint
        self.notes = notes = list(data.notes)
        if config.draws and "refresh" not in methods.named(config.method).options:
            random = counted(config.draws, "random document", "random documents")
            notes.append(
                f"negatives beside the batch: {random} per query and step; --draws 0: the batch "
                "alone"
            )
        size = config.draws * config.batch_size
        renewed, trained = round(config.refresh * len(data.documents)), size + config.batch_size
        if keeps_table(config) and renewed > 8 * trained:
            notes.append(
                f"every step re-encodes {renewed:,} documents for the table (--refresh "
                f"{config.refresh:g}) beside {trained} that train; --refresh "
                f"{trained / len(data.documents):.1g} re-encodes as many"
            )
        self.loss_options = {
            **INFORMED, "draws": size, "k": config.draws, "top": max(20, config.draws)
        }  # fmt: skip
        self.layout = {"views": "paired", "symmetric": False, "num_keys": len(data.documents)}
        self.encoder = TextEncoder(config.encoder, config.max_length)
        parts = {"train": data.train, "validation": data.validation, "test": data.test}
        done, total = 0, len(data.documents) + sum(map(len, parts.values()))
        with explained("--encoder", config.encoder), Progress(show) as progress:

            def told(count: int) -> None:
                nonlocal done
                progress.at(done := done + count)

            progress.begin(total, "texts", "tokenising")
            self.documents = Texts(self.encoder, data.documents, "document", told)
            self.queries = {
                name: Texts(self.encoder, part.texts, "query", told) for name, part in parts.items()
            }
        positives, grades = [], []
        self.key_counts = torch.zeros(len(data.documents), dtype=torch.float64)
        for graded in data.train.relevant:
            positives.append(torch.tensor(list(graded)))
            own = torch.tensor(list(graded.values()), dtype=torch.float64)
            grades.append(own.cumsum(0))
            self.key_counts[positives[-1]] += own / own.sum()  # a step takes one, by grade
        known = [torch.tensor(places) for places in data.known]
        self.positives, self.known, self.grades = (
            pad_sequence(rows, batch_first=True, padding_value=-1) if rows else torch.empty(0)
            for rows in (positives, known, grades)
        )  # [Q, L], and the grades summed up from the first on

    @classmethod
    def load(
        cls, config: TrainConfig, progress: bool, encoder_config: Mapping[str, Any] | None
    ) -> RetrievalTask:
        """The texts the settings name, for the encoder they name or a given one."""
        if encoder_config is not None:
            folder, length = encoder_config["folder"], encoder_config["max_length"]
            config = replace(config, encoder=folder, max_length=length)
        data = read_beir(Path(config.data), config.holdout, config.subset)
        if encoder_config is None and not len(data.train):
            raise ConfigError(
                f"{config.data} must hold qrels/train.tsv with positives to train on, and has "
                "none that dev.tsv or test.tsv does not ask; write one, or use negchain evaluate "
                "RUN --data for test.tsv"
            )
        if encoder_config is None and not len(data.validation):
            raise ConfigError(
                f"methods and epochs are chosen on validation queries, and --holdout "
                f"{config.holdout:g} of the training queries ({len(data.train)}) leaves none; "
                "raise --holdout or write qrels/dev.tsv"
            )
        return cls(config, data, progress)

    def info(self) -> dict[str, Any]:
        """Counts."""
        data = self.data
        return {
            "documents": len(data.documents),
            "validation": len(data.validation),
            "test": len(data.validation) + len(data.test),
        }

    def place(self, device: torch.device) -> None:
        """Positives to the device; token ids stay in memory."""
        super().place(device)
        for name in ("positives", "known", "grades"):
            setattr(self, name, getattr(self, name).to(device))

    def _pads_well(self, memory: int) -> bool:
        """Whether passes of one length fit a device, cost little more, and give what short ones do.

        A graph knows no lengths: all documents are as long as the corpus's longest. That matters
        little where the longest of a pass is nearly so long anyway, or where a step is so small
        that it waits for its launches.
        """
        lengths, queries = self.documents.lengths, self.queries["train"].lengths
        if not len(queries):
            return False
        longest, count = int(lengths.max()), self.config.batch_size * (1 + self.config.draws)
        size = 5 * (len(lengths) * longest + len(queries) * int(queries.max()))  # int32 and bool
        usual = float(np.quantile(lengths, count / (count + 1)))  # about the longest of so many
        modules = list(self.encoder.modules())
        looked_up = sum(m.weight.numel() for m in modules if isinstance(m, nn.Embedding))
        weights = sum(p.numel() for p in self.encoder.parameters()) - looked_up
        small = count * longest * weights <= SMALL_PASS
        if size > memory // 10 or not (small or longest <= PADDING * usual):
            return False
        with judged(self.encoder, self.encoder.model.device, None):
            texts = self.documents, self.queries["train"]
            return all(some.stand_padding(self.encoder) for some in texts)

    def build(self) -> tuple[TextEncoder, list[str]]:
        """The encoder as its folder has it; for a CUDA graph texts go to the device too."""
        self.capturable = self.device.type == "cuda" and self.config.graph and self._pads_well(
            torch.cuda.get_device_properties(self.device).total_memory
        )  # fmt: skip
        if self.capturable:
            for texts in (self.documents, self.queries["train"]):
                texts.pad(self.device)
        said = []
        if not (Path(self.config.encoder) / "modules.json").is_file():
            pooling = type(self.encoder.model[-1]).__name__
            said.append(f"--encoder is a plain transformers model: {pooling} was put on top")
        return self.encoder.to(self.device).train(), said

    def batch(self, index: Tensor, step: Tensor) -> Batch:
        """Queries, one positive of each, and what is known to be no negative."""
        use = rng.FOR_POSITIVE
        u = rng.uniform(self.config.seed, step, use, index, 1, torch.float64)  # [B, 1]
        grades = self.grades[index]
        whole = grades.amax(1, keepdim=True)
        at = ((grades >= 0) & (grades < u * whole)).sum(1, keepdim=True)
        keys = self.positives[index].gather(1, at)[:, 0]
        return Batch(index, keys, {"key_index": keys, "known": self.known[index]})

    def inputs(
        self, wants: Sequence[Want], step: Tensor, row: int | Tensor, loaded: Any = None
    ) -> Any:
        """Token ids and mask, [R, T] each."""
        texts = self.queries["train"] if wants[0].tower == "anchors" else self.documents
        places = torch.cat([want.ids for want in wants])
        return texts.tokens(places if self.capturable else places.cpu(), self.device)

    def judge(self) -> RetrievalJudge:
        """Ranks documents for held-out queries."""
        return RetrievalJudge(self)

    def finish(self, encoder: TextEncoder, folder: Path, summary: Mapping[str, Any]) -> None:
        """Write `model/`, which `SentenceTransformer(...)` loads, with a card."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".model-") as hidden:
            made = Path(hidden, "model")
            with naming(folder / "model"):
                encoder.model.save(str(made), create_model_card=False)
                card = _card(self, encoder, summary)
                (made / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
            shutil.rmtree(real_folder(folder / "model"))
            os.replace(made, folder / "model")


def _card(task: RetrievalTask, encoder: TextEncoder, summary: Mapping[str, Any]) -> str:
    config = task.config
    names = [name for name in summary if f"untrained_{name}" in summary]
    rows = "\n".join(
        f"| {'test' if name.startswith('test_') else 'validation'} {name.removeprefix('test_')} | "
        f"{summary['untrained_' + name]:.4f} | {summary[name]:.4f} |"
        for name in names
    )
    validation = counted(len(task.data.validation), "validation query", "validation queries")
    test = counted(len(task.data.test), "test query", "test queries")
    in_bf16 = "" if task.autocast is None else ", embeddings were computed in bf16"
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, sentence-similarity, feature-extraction, negchain]
---

# {Path(config.encoder).name} fine-tuned on {Path(config.data).name}

Embeddings of size {encoder.embedding_dim} of texts of up to {encoder.model.max_seq_length} tokens,
compared by the cosine. Trained by negchain on {task.num_samples:,} queries over
{len(task.data.documents):,} documents: method {config.method}, batch size {config.batch_size}, beta
{config.beta:g}, lr {config.lr:g}, seed {config.seed}; the encoder of step
{summary.get("best_step", summary["step"]):,} of {summary["step"]:,}.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/of/this/folder")
scores = model.similarity(model.encode_query(["a question"]), model.encode_document(["a text"]))
```

## Results

On {validation}, by which settings and epoch were chosen, and
{test}; relevance counts as yes or no{in_bf16}.

| number | before | after |
|---|---|---|
{rows or "| none | | |"}
"""
