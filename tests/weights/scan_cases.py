"""Inputs every implementation of `mh_scan` must agree on; run as a script it checks Triton.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/weights/scan_cases.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

COLUMNS = (1, 2, 7, 41, 401, 1271)
ROWS = 5
FEW = ("K=401 excluded", "K=1271 never left")  # what a slow interpreter is given of wide shapes


def scan_cases(
    columns: tuple[int, ...] = COLUMNS,
) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, int | Tensor]]]:
    for k in columns:
        generator = torch.Generator().manual_seed(k)

        def draw(*shape: int, scale: float = 1.0, g=generator) -> Tensor:
            return scale * torch.randn(*shape, generator=g)

        log_u = torch.rand(ROWS, k, generator=generator).clamp_(min=1e-9).log()
        for scale in (0.3, 14.28):
            logits, start = draw(ROWS, k, scale=scale), draw(ROWS, scale=scale)
            for burn_in in sorted({0, k // 2, k - 1}):
                yield f"K={k} scale={scale} P={burn_in}", (logits, start, log_u, burn_in)
            holes = logits.clone()
            holes[torch.rand(ROWS, k, generator=generator) < 0.4] = -math.inf
            holes[1] = -math.inf
            yield f"K={k} excluded", (holes, start, log_u, k // 3)
            steps = (holes > -math.inf).sum(1)
            yield f"K={k} burn-in per row", (holes, start, log_u, (steps - 1).clamp(min=0))
            yield f"K={k} burn-in of all steps", (holes, start, log_u, steps)
            yield (
                f"K={k} first column excluded",
                (
                    torch.cat([torch.full((ROWS, 1), -math.inf), logits[:, 1:]], 1),
                    start,
                    log_u,
                    0,
                ),
            )
        yield f"K={k} never left", (draw(ROWS, k), torch.full((ROWS,), 1e4), log_u, k // 2)
        yield f"K={k} no start", (draw(ROWS, k), torch.full((ROWS,), -math.inf), log_u, 0)
        yield f"K={k} equal logits", (torch.zeros(ROWS, k), torch.zeros(ROWS), log_u, 0)
        yield (
            f"K={k} float64",
            (
                draw(ROWS, k).double(),
                draw(ROWS).double(),
                log_u.double(),
                k // 2,
            ),
        )


def disagreement(backend: str, device: str = "cpu", *, thin: bool = False) -> list[str]:
    """Cases and outputs in which a backend differs from the reference in a single bit."""
    from negchain import mh_scan

    found = []
    for name, inputs in scan_cases():
        if thin and inputs[0].shape[1] > 100:
            if not any(word in name for word in FEW):
                continue
            inputs = tuple(x[:2] if isinstance(x, Tensor) else x for x in inputs)
        elif thin:
            inputs = tuple(x[:3] if isinstance(x, Tensor) else x for x in inputs)
        moved = [x.to(device) if isinstance(x, Tensor) else x for x in inputs]
        got = mh_scan(*moved, backend=backend)
        expected = mh_scan(*inputs, backend="reference")
        for field in expected._fields:
            a, b = getattr(got, field).cpu(), getattr(expected, field)
            if a.dtype != b.dtype or not torch.equal(a, b):
                found.append(f"{name}: {field}")
    return found


if __name__ == "__main__":
    from interpreter import hurry

    torch.set_num_threads(1)
    hurry()
    wrong = disagreement("triton")
    raise SystemExit("\n".join(wrong) if wrong else 0)
