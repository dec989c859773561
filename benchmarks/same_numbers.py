"""Do all losses give the numbers they gave before the rewrite onto one protocol?

Shows    50 steps of every method on fixed embeddings in two source trees, one process each.
Prints   a table: whether gradients, chains and values are equal to the bit, and if not how far the
         gradients are apart (as a share) and from which step on.

    git worktree add /tmp/old cc51acd              # the last commit before the rewrite
    PYTHONPATH=src python benchmarks/same_numbers.py /tmp/old
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

M, KEYS, D, STEPS, BETA = 48, 60, 8, 50, 8.0

# name: loss, options of both trees, options of the old, options of the new, kind of batches
Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]
PAIRED, ONE_WAY = {"views": "paired"}, {"views": "paired", "symmetric": False}
ALL = {"denominator": "all"}
CASES: dict[str, Case] = {
    "infonce": ("InfoNCELoss", {}, {}, {}, ""),
    "infonce, paired": ("InfoNCELoss", PAIRED, {}, {}, ""),
    "dcl": ("DCLLoss", {}, {}, {}, ""),
    "dcl, one way": ("DCLLoss", ONE_WAY, {}, {}, ""),
    "dcl, known": ("DCLLoss", {}, {}, {}, "known"),
    "dcl, repeated ids": ("DCLLoss", {}, {}, {}, "repeats"),
    "sogclr": ("SogCLRLoss", {}, {}, {}, ""),
    "sogclr, paired, all": ("SogCLRLoss", {**PAIRED, **ALL}, {}, {}, ""),
    "sogclr, repeated ids": ("SogCLRLoss", {}, {}, {}, "repeats"),
    "negcache": ("NegativeCacheLoss", {"dim": D, "refresh": 0.1}, {}, {}, ""),
    "negcache, paired, all": (
        "NegativeCacheLoss", {"dim": D, "refresh": 0.1, **PAIRED, **ALL}, {}, {}, "",
    ),
    "emc2": ("EMC2Loss", {}, {}, {}, ""),
    "emc2, one view as anchors": ("EMC2Loss", {"symmetric": False}, {}, {}, ""),
    "emc2, paired": ("EMC2Loss", PAIRED, {}, {}, ""),
    "emc2, paired, one way": ("EMC2Loss", ONE_WAY, {}, {}, ""),
    "emc2, repeated ids": ("EMC2Loss", {}, {}, {}, "repeats"),
    "emc2, known": ("EMC2Loss", {}, {}, {}, "known"),
    "emc2, cached": ("EMC2Loss", {"carried": "cached", "dim": D}, {}, {}, ""),
    "emc2, all": ("EMC2Loss", ALL, {}, {}, ""),
    "emc2, burn-in 0": ("EMC2Loss", {}, {"burn_in": 0.0}, {"MH": {"burn_in": 0.0}}, ""),
    "emc2, counts every 3rd": ("EMC2Loss", {}, {"count_every": 3}, {"MH": {"count_every": 3}}, ""),
    "emc2, 2 augmentations": ("EMC2Loss", {"augmentations": 2}, {}, {}, "stored"),
    "emc2, uniform draws alone": ("EMC2Loss", {}, {"proposal": "draw"}, {"Given": True}, "draw"),
    "emc2, draws beside the batch": ("EMC2Loss", {}, {}, {"Given": False}, "draw"),
    "emc2, informed": ("EMC2Loss", {"dim": D}, {"proposal": "cache"}, {"Informed": None}, ""),
    "emc2, corpus": ("EMC2Loss", {**PAIRED, "num_keys": KEYS}, {}, {}, "corpus"),
    "emc2, large batch": (
        "EMC2Loss", {}, {"stream": True}, {"stream": True, "MH": {"count_every": 1}}, "",
    ),
    "isir": ("EMC2Loss", {"kernel": "isir"}, {}, {}, ""),
    "isir, cached": ("EMC2Loss", {"kernel": "isir", "carried": "cached", "dim": D}, {}, {}, ""),
    "isir, repeated ids": ("EMC2Loss", {"kernel": "isir"}, {}, {}, "repeats"),
    "isir, draws beside the batch": ("EMC2Loss", {"kernel": "isir"}, {}, {"Given": False}, "draw"),
    "isir, large batch": ("EMC2Loss", {"kernel": "isir"}, {"stream": True}, {"stream": True}, ""),
}  # fmt: skip


def build(negchain: Any, case: Case, new: bool) -> Any:
    """The case's loss in the tree at hand."""
    name, both, old, now, _ = case
    options = {**both, **(now if new else old)}
    if not new:
        small = name in ("InfoNCELoss", "DCLLoss")
        kind = getattr(negchain, name)
        if name == "NegativeCacheLoss":
            return kind(M, options.pop("dim"), BETA, **options)
        return kind(BETA, num_samples=M, **options) if small else kind(M, BETA, **options)
    if "MH" in options:
        options["kernel"] = negchain.MH(**options.pop("MH"))
    if "Given" in options:
        options["proposals"] = negchain.Given(alone=options.pop("Given"))
    if "Informed" in options:
        options["proposals"] = negchain.Informed(refresh=0.0)
        options.pop("Informed")
    name = "LargeBatchEMC2Loss" if options.pop("stream", False) else name
    return getattr(negchain, name)(M, BETA, **options)


def batches(kind: str, generator: torch.Generator) -> list[Tensor]:
    if kind == "repeats":
        return [torch.randint(M, (8,), generator=generator) for _ in range(STEPS)]
    return [torch.randperm(M, generator=generator)[:8] for _ in range(STEPS)]


def call_old(loss_fn: Any, z: Tensor, index: Tensor, more: dict[str, Any]) -> Tensor:
    """One step as it was: carried, propose and refresh are the caller's to know."""
    z_a, z_b, towers = z[0][index], z[1][more.get("key_index", index)], (z[1], z[0])
    if loss_fn.views == "shared":
        towers = (z[0], z[0])
    stored = more.get("augmentation")
    if stored is not None:
        z_a, z_b = z[0][index * 2 + stored[0]], z[0][index * 2 + stored[1]]
    if hasattr(loss_fn, "carried") and getattr(loss_fn, "carried_mode", "") == "encode":
        held = loss_fn.carried(index, *([stored] if stored is not None else []))
        pair = isinstance(held, tuple)
        more["carried"] = (
            tuple(t[h] for t, h in zip(towers, held, strict=True)) if pair else towers[0][held]
        )
    if hasattr(loss_fn, "propose") and getattr(loss_fn, "proposal", "cache") == "cache":
        draw = loss_fn.propose(z_a, index, z_b)
        more["draw"] = draw
        both = zip(towers, draw, strict=False) if not hasattr(draw, "ids") else [(towers[0], draw)]
        drawn = [t[d.ids] for t, d in both]
        more["drawn"] = drawn[0] if hasattr(draw, "ids") else tuple(drawn)
    value = loss_fn(z_a, z_b, index, **more)
    if hasattr(loss_fn, "refresh_ids"):
        for side in range(loss_fn.num_sides):
            ids = loss_fn.tables[side].next_ids(len(loss_fn.refresh_ids()))
            loss_fn.refresh(ids, towers[side][ids].detach(), side)
    return value


def call_new(loss_fn: Any, z: Tensor, index: Tensor, more: dict[str, Any]) -> Tensor:
    """One step as it is."""
    z_a, z_b = z[0][index], z[1][more.get("key_index", index)]
    if "augmentation" in more:
        first, second = more["augmentation"]
        z_a, z_b = z[0][index * 2 + first], z[0][index * 2 + second]
    towers = tuple(lambda ids, t=t: t[ids] for t in z)
    encode = towers[0] if loss_fn.views == "shared" else towers
    return loss_fn(z_a, z_b, index, encode=encode, **more)


def trace(new: bool) -> dict[str, dict[str, Tensor]]:
    """Per case: gradients [S,2,T,D], values [S] and the chains after every step."""
    import negchain

    found = {}
    for name, case in CASES.items():
        generator = torch.Generator().manual_seed(1)
        items = torch.randn(2 * M, D, generator=generator)
        leaf = torch.stack([items, items + 0.3 * torch.randn(2 * M, D, generator=generator)])
        leaf.requires_grad_()
        loss_fn, kind = build(negchain, case, new), case[4]
        steps: dict[str, list[Tensor]] = {"gradients": [], "values": [], "state": []}
        for index in batches(kind, generator):
            more: dict[str, Any] = {}
            if kind == "known":
                more["known"] = torch.stack([(index + 1) % M, (index - 1) % M], 1)  # both ways
            if kind == "corpus":
                more["key_index"] = index
            if kind == "stored":
                more["augmentation"] = (index % 2, (index + 1) % 2)
            if kind == "draw":
                ids = torch.randint(M, (6,), generator=generator)
                more |= {"draw": negchain.Draw(ids), "drawn": leaf[0][ids]}
            value = (call_new if new else call_old)(loss_fn, leaf, index, more)
            steps["gradients"].append(torch.autograd.grad(value, leaf)[0])
            steps["values"].append(value.detach())
            if hasattr(loss_fn, "chains"):
                steps["state"].append(loss_fn.chains.states.clone().long())
            elif hasattr(loss_fn, "log_u"):
                steps["state"].append(loss_fn.log_u.clone())
        found[name] = {k: torch.stack(v) for k, v in steps.items() if v}
    return found


def described(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    def equal(name: str) -> str:
        if name not in a or name not in b:
            return "none"
        x, y = (t[name].nan_to_num(-7.5) for t in (a, b))
        return "equal" if x.shape == y.shape and torch.equal(x, y) else "differs"

    apart = (a["gradients"] - b["gradients"]).flatten(1).norm(dim=1)
    share = apart / a["gradients"].flatten(1).norm(dim=1).clamp(min=1e-9)
    first = int((share > 1e-5).int().argmax()) if bool((share > 1e-5).any()) else -1
    words = [equal(name) for name in ("gradients", "state", "values")]
    return " | ".join([*words, f"{float(share.max()):.0e}", "" if first < 0 else f"{first}"])


def main() -> None:
    """Run both trees and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the other source tree")
    parser.add_argument("--trace", type=Path, help="run one tree only, and save its numbers")
    parser.add_argument("--is-old", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trace:
        torch.save(trace(not options.is_old), options.trace)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for tree, flags in ((options.old, ["--is-old"]), (Path(__file__).parents[1], [])):
            files.append(Path(folder) / f"{len(files)}.pt")
            words = [__file__, str(options.old), "--trace", str(files[-1]), *flags]
            env = {**os.environ, "PYTHONPATH": str(tree / "src")}
            subprocess.run([sys.executable, *words], env=env, check=True)
        old, new = (torch.load(file, weights_only=True) for file in files)
    print("| method | gradients | chains or averages | values | largest difference | from step |")
    print("|---|---|---|---|---|---|")
    for name in CASES:
        print(f"| {name} | {described(old[name], new[name])} |")


if __name__ == "__main__":
    main()
