"""Pictures with captions, encoders frozen: is the global loss itself worth having?

    PYTHONPATH=src python benchmarks/frozen_pairs.py CARRIED [--methods infonce exact ...]
        [--seeds 3] [--betas 10 20 40] [--epochs 10] [--out frozen_pairs.jsonl]

CARRIED is the folder that image_text.py --pack makes. Features of EfficientNet-Lite0 and MiniLM are
computed once (minutes); two linear maps to 256 dimensions are trained on them, b = 16, so that
"exact", the softmax over all training captions and pictures at every step, can be run beside its
estimates. A run is a line: recall at 1 and 5, mean of both ways, of validation and test pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import image_text
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from negchain import EMC2Loss, ImportanceLoss, InfoNCELoss, Informed, SogCLRLoss, Uniform

BATCH, HELD = 16, 700
METHODS = ("infonce", "sogclr", "emc2", "isir", "informed", "exact")


@torch.inference_mode()
def features(carried: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Of pictures [M,F] and captions [M,5,T], and which pictures are for testing [M]."""
    import timm
    from PIL import Image
    from safetensors.torch import load_file

    from negchain.tasks.text import load_model

    given = dict(np.load(carried / "pictures.npz"))
    model = timm.create_model(image_text.ENCODER, num_classes=0).eval()
    weights = load_file(carried / "image.safetensors")
    model.load_state_dict({n: v.to(model.state_dict()[n].dtype) for n, v in weights.items()})
    mean, std = (torch.tensor(model.pretrained_cfg[n])[:, None, None] for n in ("mean", "std"))

    def picture(begin: int, end: int) -> Tensor:
        image = Image.open(io.BytesIO(given["data"][begin:end].tobytes())).convert("RGB")
        side = min(image.size)
        left, top = ((n - side) // 2 for n in image.size)
        image = image.crop((left, top, left + side, top + side)).resize((112, 112))
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std

    spans = list(zip(given["offsets"][:-1], given["offsets"][1:], strict=True))
    parts = [spans[n : n + 64] for n in range(0, len(spans), 64)]
    images = torch.cat([model(torch.stack([picture(*span) for span in part])) for part in parts])

    bert = load_model(str(carried / "minilm"), "CARRIED")  # the mean of its tokens
    texts = [str(text) for text in given["captions"].flatten()]
    found = bert.encode(texts, convert_to_tensor=True, show_progress_bar=False).float()
    captions = found.view(len(images), -1, found.shape[1])
    return images, captions, torch.from_numpy(given["split"] == 1)


def recall(maps: tuple[nn.Module, nn.Module], images: Tensor, texts: Tensor) -> list[float]:
    """At 1 and at 5, mean of both ways."""
    both = images, texts.flatten(0, 1)
    with torch.no_grad():
        a, b = (normalize(f(x), dim=1) for f, x in zip(maps, both, strict=True))
    own, place = torch.arange(len(a)).repeat_interleave(texts.shape[1]), torch.arange(len(a))
    found = []
    for k in (1, 5):
        to_text = (own[(a @ b.T).topk(k, 1).indices] == place[:, None]).any(1).float().mean()
        to_image = ((b @ a.T).topk(k, 1).indices == own[:, None]).any(1).float().mean()
        found.append(round(float(to_text + to_image) / 2, 4))
    return found


def loss_of(method: str, samples: int, beta: float) -> Any:
    """Every estimate of the loss with the positive in its denominator; None: the loss itself."""
    paired: Any = {"views": "paired", "denominator": "all"}
    if method == "infonce":
        return InfoNCELoss(beta=beta, views="paired")
    if method == "sogclr":
        return SogCLRLoss(samples, beta, proposals=Uniform(BATCH), **paired)
    if method in ("emc2", "isir"):
        return EMC2Loss(samples, beta, "isir" if method == "isir" else "mh", **paired)
    if method == "informed":
        draws = Informed(BATCH, share=0.9, sharpness=0.5)
        return ImportanceLoss(samples, beta, proposals=draws, **paired)
    return None


def train(
    method: str, beta: float, seed: int, epochs: int, images: Tensor, texts: Tensor
) -> tuple[nn.Module, nn.Module]:
    """The two maps."""
    torch.manual_seed(seed)
    maps = nn.Linear(images.shape[1], 256), nn.Linear(texts.shape[2], 256)
    optimizer = torch.optim.AdamW([p for f in maps for p in f.parameters()], weight_decay=0.05)
    samples, kinds = texts.shape[:2]
    loss_fn, steps = loss_of(method, samples, beta), epochs * (samples // BATCH)
    everything, order = torch.arange(samples), torch.randperm(samples)
    encode = (
        lambda ids: maps[0](images[ids]),
        lambda ids: maps[1](texts[ids, torch.randint(kinds, (len(ids),))]),
    )
    for step in range(steps):
        rate = min(1, (step + 1) / (0.05 * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        place = step % (samples // BATCH) * BATCH
        order = torch.randperm(samples) if place == 0 else order
        index = order[place : place + BATCH]
        if loss_fn is None:
            a, b = (normalize(f(everything), dim=1) for f in encode)
            a_to_b, b_to_a = beta * a[index] @ b.T, beta * b[index] @ a.T
            loss = (cross_entropy(a_to_b, index) + cross_entropy(b_to_a, index)) / 2
        else:
            more = {} if method == "infonce" else {"encode": encode}
            loss = loss_fn(encode[0](index), encode[1](index), index, **more)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return maps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("carried", type=Path)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--betas", type=float, nargs="+", default=[10.0, 20.0, 40.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("frozen_pairs.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    images, texts, testing = features(given.carried)
    seen = ~testing
    images = (images - images[seen].mean(0)) / images[seen].std(0).clamp(min=1e-3)
    texts = (texts - texts[seen].mean((0, 1))) / texts[seen].std((0, 1)).clamp(min=1e-3)
    rest = seen.nonzero()[:, 0]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))]
    held, kept = rest[:HELD], rest[HELD:]
    with given.out.open("a") as file:
        for seed in range(given.seeds):
            for method in given.methods:
                for beta in given.betas:
                    begin = time.perf_counter()
                    maps = train(method, beta, seed, given.epochs, images[kept], texts[kept])
                    row = {"method": method, "beta": beta, "seed": seed, "epochs": given.epochs}
                    row["validation"] = recall(maps, images[held], texts[held])
                    row["test"] = recall(maps, images[testing], texts[testing])
                    row["seconds"] = round(time.perf_counter() - begin, 1)
                    print(row, flush=True)
                    file.write(json.dumps(row) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
