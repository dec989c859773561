"""A training step on a CPU: how weights lie in memory, and the precision of the encoder.

Shows    what `negchain train` gains on a CPU by weights in channels-last order and, where the CPU
         has instructions for it (AVX-512 BF16), by `--precision auto`, which takes bf16 there.
Data     random pictures of 96 px, b = 64; texts of 200 tokens, b = 32 (with --text FOLDER).
Prints   seconds of a forward and backward pass, round by round in turns, and their ratios.

    PYTHONPATH=src python benchmarks/cpu_step.py --text ./all-MiniLM-L6-v2

About five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from negchain.encoders import build_encoder
from negchain.machine import commit, hardware, versions
from negchain.tasks.task import multiplies_bf16

ENCODERS = ("small-cnn", "resnet18", "resnet50", "vit_tiny_patch16_224", "convnext_atto")
LAYOUTS = {"plain": torch.contiguous_format, "channels last": torch.channels_last}
CASES = (("plain", False), ("channels last", False), ("plain", True), ("channels last", True))


def picture_pass(name: str, layout: str, bf16: bool) -> Callable[[], object]:
    """One pass over 128 views: a batch of 64."""
    small = name == "small-cnn"
    size, channels = (8, 1) if small else (96, 3)
    encoder = build_encoder(name, image_size=size, channels=channels, norm="batch")
    encoder.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
    pixels = torch.randn(128, channels, size, size).contiguous(memory_format=LAYOUTS[layout])
    return lambda: one_pass(encoder, pixels, bf16)


def text_pass(folder: str, bf16: bool) -> Callable[[], object]:
    """One pass over 32 texts of 200 tokens."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", local_files_only=True).train()
    ids = torch.randint(1000, 20000, (32, 200))
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return lambda: one_pass(lambda t: model(dict(t))["sentence_embedding"], tokens, bf16)


def one_pass(encode: nn.Module | Callable[..., Tensor], inputs: object, bf16: bool) -> None:
    """Forward and backward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        z = encode(inputs)
    torch.autograd.backward(z.float().square().mean())


def timed(passes: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, all in turn in every round, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + 1):
        for name, run in passes.items():
            begin = time.perf_counter()
            run()
            if number:
                found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="folder of a sentence-transformers encoder")
    parser.add_argument("--encoders", nargs="+", default=ENCODERS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{hardware(torch.device('cpu'))}; {versions()}; commit {commit()}")
    print(f"bf16 instructions: {multiplies_bf16()}; --precision auto takes it where there are some")
    titles = [f"{layout}, {'bf16' if bf16 else 'float32'}" for layout, bf16 in CASES]
    print("| encoder | " + " | ".join(titles) + " | first / last |\n|" + "---|" * 6)
    for name in options.encoders:
        passes = {t: picture_pass(name, *case) for t, case in zip(titles, CASES, strict=True)}
        print_row(name, timed(passes, options.rounds))
    if options.text:
        passes = {t: text_pass(options.text, t.endswith("bf16")) for t in ("float32", "bf16")}
        found = timed(passes, options.rounds)
        print_row("text encoder", {"": found["float32"], "-": 0, "=": 0, "bf16": found["bf16"]})


def print_row(name: str, found: dict[str, float]) -> None:
    """A line of the table."""
    cells = [f"{1e3 * t:,.0f} ms" if t else "" for t in found.values()]
    first, *_, last = found.values()
    print(f"| {name} | " + " | ".join(cells) + f" | {first / last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
