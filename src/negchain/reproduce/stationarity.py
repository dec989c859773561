"""Exact loss and squared gradient norm on 500 stored images (the paper's Fig. 7).

The paper's claim and what was found are in docs/results.md. D_pos holds all pairs of views, equal
ones too; the loss is eq. (1) as written (the authors' "exact" loss has β² and the positive in the
denominator). Ours are full-gradient descent as the floor, larger steps, β = 14.28, DCL and i-SIR.
All embeddings equal is a stationary point too, with loss log m_neg: such runs are counted as
collapsed, not as converged.

Negative Cache and informed importance keep a table of every image's first stored view only. The
second is never their negative, so they optimise another loss than the exact L they are measured by.
(The paper restricts Negative Cache to images without augmentation; for informed importance it is
ours.)
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from negchain.augment import augmentation, finite_views
from negchain.chunked import Chunked
from negchain.data import load_data
from negchain.encoders import build_encoder
from negchain.exact import global_loss
from negchain.methods import LossSettings, named, reproduced, title_of
from negchain.reproduce import pages
from negchain.reproduce.common import FULL, Experiment, Options, Row
from negchain.reproduce.pages import colour, distinct, spread, where
from negchain.tasks import COLLAPSED
from negchain.train.order import DataOrder
from negchain.train.presets import choose

METHODS = (*reproduced(), FULL)
OPTIONS = {"burn_in": 3, "augmentations": 2, "gamma": 0.9, "refresh": 0.1}  # paper; gamma: authors'
CHUNK = 250  # views encoded at a time for exact gradients

SETTINGS = {"paper": (5.0, 1e-3), "larger": (5.0, 1e-2), "sharp": (14.28, 1e-2)}  # β, step size
Measure = Callable[[nn.Module, Tensor, float], Row]  # of encoder, views and β; None: `exact`
FLOORS = 2  # seeds of full-gradient descent, which encodes everything at every step


def jobs(options: Options) -> list[Row]:
    """Every seed, setting and method; a small encoder on the CPU, ResNet-18 on a GPU.

    A job names its device where that is not its encoder's.
    """
    setup: Row = {"encoder": "mlp", "size": 16, "images": 500, "batch": 4}
    setup |= {"encoder": "resnet18", "size": 96} if options.on_gpu() else {}
    setup |= {"data": options.data or "digits", "steps": 125 * (options.epochs or 10)}
    if setup["data"] == "digits":
        setup["size"] = 8
    if options.quick:
        setup |= {"images": 40, "steps": 40, "encoder": "mlp"}
        setup |= {"device": "cuda"} if options.on_gpu() else {}
    given = [choose("--settings", name, SETTINGS) for name in options.settings or ()]
    return [
        {"seed": seed, **dict(zip(("beta", "lr"), SETTINGS[name], strict=True)), "method": method}
        | setup
        for seed in range(options.seeds or (1 if options.quick else 5))
        for name in given or (("sharp",) if options.quick else tuple(SETTINGS))
        for method in options.methods or METHODS
        if method != FULL or seed < FLOORS
    ]


@functools.cache
def first_images(data: str, count: int, size: int) -> Tensor:
    """The first images in the data set's own order, uint8 [M,C,size,size].

    Folders are sorted by class, and the files in them are named by their number; a built-in set
    counts what is labelled and what is not apart, and begins with the labelled.
    """
    images = load_data(data, image_size=size, progress=False).pretrain
    order = sorted(range(len(images)), key=lambda i: _number(images.names[i]))
    return images.fetch(torch.tensor(order[:count]))


def _number(name: str) -> tuple[bool, int, str]:
    path = Path(name)
    return "unlabeled" in path.parts, int(path.stem) if path.stem.isdigit() else 0, name


def build(name: str, images: Tensor, seed: int) -> nn.Module:
    """An encoder of a sample at a time; "mlp": 128 units, 64 dimensions, for a CPU."""
    channels, size = images.shape[1:3]
    if name != "mlp":
        return build_encoder(name, image_size=size, channels=channels, norm="none", seed=seed)
    torch.manual_seed(seed)
    hidden = nn.Linear(channels * size * size, 128)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(128, 64))


def exact(encoder: nn.Module, views: Tensor, beta: float) -> Row:
    """Eq. (1) on the stored views [2,M,C,H,W], its gradient left in the parameters' `.grad`."""
    z = nn.functional.normalize(Chunked(encoder, CHUNK)(views.flatten(0, 1)).double(), dim=-1)
    a, b = z.chunk(2)
    similarity = torch.linalg.vecdot(a, b).mean()
    # Half of D_pos are pairs of a view with itself, whose similarity is 1.
    loss = global_loss(a, b, beta) + beta * similarity - beta * (similarity + 1) / 2
    if not math.isfinite(loss.item()):  # a table of numbers has no place for it
        raise ValueError(f"the exact loss is {loss.item()}: the run diverged; lower its step size")
    encoder.zero_grad()
    torch.autograd.backward(loss)
    parameters = list(encoder.parameters())
    grads = [p.grad.double() for p in parameters if p.grad is not None]
    return {
        "exact_loss": loss.item(),
        "gradient": sum(g.square().sum().item() for g in grads),
        "variance": 1 - z.mean(0).square().sum().item(),
        "similarity": similarity.item(),
        "weights": sum(p.square().sum().item() for p in parameters),
    }


def work(job: Row, deadline: float, measure: Measure | None = None) -> Row:
    """One run of SGD, measured at 16 steps spread evenly over the logarithm."""
    device = torch.device(job.get("device", "cuda" if job["encoder"] == "resnet18" else "cpu"))
    torch.manual_seed(job["seed"])
    images = first_images(job["data"], job["images"], job["size"])
    recipe = "digits" if images.shape[1] == 1 else "simclr-stl10"
    augment = augmentation(recipe, size=job["size"])
    stored = augment.plain(finite_views(images, augment, 2, job["seed"]).flatten(0, 1))
    views = stored.view(len(images), 2, *stored.shape[1:]).transpose(0, 1).contiguous().to(device)
    encoder = build(job["encoder"], images, job["seed"]).to(device)
    dim = encoder(views[0, :1]).shape[1]
    settings = LossSettings(len(images), job["beta"], dim, job["seed"], options=OPTIONS)
    full = job["method"] == FULL
    loss_fn = None if full else named(job["method"]).build(settings).to(device)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=job["lr"], weight_decay=1e-4)
    order = DataOrder(len(images), job["batch"], job["seed"])
    generator = torch.Generator().manual_seed(job["seed"])

    def encode(ids: Tensor) -> Tensor:  # `item * 2 + view`; some losses name items alone
        paired = loss_fn is not None and loss_fn.ids_per_item > 1
        z: Tensor = encoder(views[ids % 2, ids // 2] if paired else views[0, ids])
        return z

    if loss_fn is not None:
        loss_fn.fill(encode)
    steps, curve = job["steps"], []
    measured = {0, steps} | {round(steps ** (k / 14)) for k in range(4, 14)}
    for step in range(steps + 1):
        late = time.time() > deadline
        if step in measured or late or full:
            numbers = (measure or exact)(encoder, views, job["beta"])
            if step in measured or late:
                curve.append({"step": step, **numbers})
        if step == steps or late:
            break
        if loss_fn is not None:
            optimizer.zero_grad()
            index = order.batch(step).to(device)  # each with two of its views, maybe the same
            first, second = torch.randint(0, 2, (2, len(index)), generator=generator).to(device)
            z_a, z_b = encoder(torch.cat([views[first, index], views[second, index]])).chunk(2)
            which = (first, second) if loss_fn.ids_per_item > 1 else None
            loss = loss_fn(z_a, z_b, index, augmentation=which, encode=encode)
            torch.autograd.backward(loss)
        optimizer.step()
    return {"complete": not late, "curve": curve}


def collapsed(point: Row) -> bool:
    """Whether all embeddings are nearly equal, where the gradient vanishes at loss log m_neg."""
    return bool(point["variance"] < COLLAPSED)


def table(rows: list[Row]) -> str:
    """Where every method ends, and its least norm: of what was not collapsed, over seeds."""
    lines = []
    cases = distinct(rows, "encoder", "beta", "lr", "method")
    for encoder, beta, lr, method in sorted(cases, key=lambda case: case[:3]):
        found = where(rows, encoder=encoder, beta=beta, lr=lr, method=method)
        found = [row for row in found if row.get("complete", True)]
        if not found:
            continue
        runs = [row for row in found if not collapsed(row["curve"][-1])]
        kept = [row["curve"][-1] for row in runs]
        ways = [[p["gradient"] for p in row["curve"][1:] if not collapsed(p)] for row in runs]
        best = [min(way) for way in ways]
        case = [encoder, f"{beta:g}", f"{lr:g}", title_of(method)]
        case += [f"{len(found) - len(runs)} of {len(found)}"]
        ends = [spread((p["exact_loss"] for p in kept), 2), powers([p["gradient"] for p in kept])]
        rest = [powers(best), *(spread((p[k] for p in kept), 2) for k in ("variance", "weights"))]
        lines.append([*case, *ends, *rest])
    heads = ["encoder", "β", "step size", "method", "collapsed", "exact L", "‖∇L‖²"]
    return pages.markdown([*heads, "least ‖∇L‖² on the way", "variance", "‖θ‖²"], lines)


def powers(values: list[float]) -> str:
    """Geometric mean, and the factor by which seeds differ from it."""
    if not values:
        return "–"
    logs = [math.log10(max(v, 1e-300)) for v in values]
    mean = statistics.fmean(logs)
    spread = f" (×/÷ {10 ** statistics.stdev(logs):.1f})" if len(logs) > 1 else ""
    return f"{10**mean:.2g}{spread}"


def draw(rows: list[Row]) -> dict[str, Any]:
    """Loss above, squared gradient norm below, a column per β and step size.

    Runs whose end is collapsed have a dotted line each and are in no mean.
    """
    from matplotlib.figure import Figure

    cases = sorted(distinct(rows, "encoder", "beta", "lr"))
    figure = Figure(figsize=(3.4 * len(cases), 5.2), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, (encoder, beta, lr) in enumerate(cases):
        for axis, key in zip(axes[:, column], ("exact_loss", "gradient"), strict=True):
            for method in distinct(rows, "method"):
                found = where(rows, encoder=encoder, beta=beta, lr=lr, method=method)
                fallen = [row for row in found if collapsed(row["curve"][-1])]
                for row in fallen:
                    steps, values = ([p[name] for p in row["curve"]] for name in ("step", key))
                    axis.plot(steps, values, ":", color=colour(method), linewidth=1)
                kept = [row for row in found if row not in fallen]
                pages.plot_curves(axis, kept, "step", key, title_of(method), colour(method))
            axis.set(xscale="symlog", xlabel="iterations")
        axes[1, column].set_yscale("log")
        axes[0, column].set_title(f"{encoder}, β = {beta:g}, step {lr:g}")
    axes[0, 0].set_ylabel("exact L")
    axes[1, 0].set_ylabel("‖∇L‖²")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    dotted = [line for axis in axes.flat for line in axis.lines if line.get_linestyle() == ":"]
    if dotted:
        lines, labels = [*lines, dotted[0]], [*labels, "a run that ends collapsed"]
    figure.legend(lines, labels, loc="outside lower center", ncols=-(-len(labels) // 2))
    return {"stationarity": figure}


_KEYS = ("job.seed", "job.encoder", "job.beta", "job.lr", "job.method")
_POINT = ("curve.step", "curve.exact_loss", "curve.gradient", "curve.variance", "curve.weights")
EXPERIMENTS = {"stationarity": Experiment(table, draw, jobs, work, needs=(*_KEYS, *_POINT))}
