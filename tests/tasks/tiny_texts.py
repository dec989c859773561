"""A tiny retriever and a tiny BEIR folder, made of a few words; nothing is fetched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

TOPICS = ("glacier", "neuron", "harbour", "violin", "copper", "orchid", "comet", "bridge")
ASKED = ("ice", "nerve", "port", "fiddle", "metal", "flower", "star", "span")  # in queries
FACTS = ("moves", "sings", "shines", "grows", "breaks")
WORDS = (*TOPICS, *ASKED, *FACTS, "what", "the", "a", "in", "old", "text")


def write_model(folder: Path, seed: int = 0) -> Path:
    """A BERT of 16 dimensions with random weights, as transformers saves it."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def write_beir(folder: Path, packed: bool = True) -> Path:
    """40 documents, topic by fact, and a query for each in other words; one document has a copy.

    Queries d0, d5, ... are for test. Query q1 has two positives of different grade, q2 none.
    """
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"d{n}", "title": topic, "text": f"the old {topic} {fact} in a text"}
        for n, (topic, fact) in enumerate((t, f) for t in TOPICS for f in FACTS)
    ]
    documents.append({**documents[0], "_id": "copy"})
    lines = "".join(json.dumps(d) + "\n" for d in documents).encode()
    if packed:
        with gzip.open(folder / "corpus.jsonl.gz", "wb") as file:
            file.write(lines)
    else:
        (folder / "corpus.jsonl").write_bytes(lines)
    with open(folder / "queries.jsonl", "w") as file:
        for n in range(40):
            text = f"what {FACTS[n % 5]} the {ASKED[n // 5]}"
            file.write(json.dumps({"_id": f"q{n}", "text": text}) + "\n")
    for split, rest in (("train", (0, 1, 2, 3)), ("test", (4,))):
        rows = [(f"q{n}", f"d{n}", int(n != 2)) for n in range(40) if n % 5 in rest]
        rows += [("q1", "d0", 3)] if split == "train" else []
        text = "".join(f"{q}\t{d}\t{score}\n" for q, d, score in rows)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + text)
    return folder
