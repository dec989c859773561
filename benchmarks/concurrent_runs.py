"""Runs of `negchain train` at the same time on one GPU: in turns, and through NVIDIA's MPS.

    PYTHONPATH=src python benchmarks/concurrent_runs.py --data PATH [--json FILE] [-- OPTIONS]

Prints, for k runs at a time, images/s of each, of all, and the ratio of all to one alone. Options
after `--` go to `negchain train`. The table is `negchain.train.concurrent.measure`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from negchain.train.concurrent import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="what negchain train --data takes")
    parser.add_argument("--preset", default="stl10-b32", help='"" for none')
    parser.add_argument("--jobs", default="2,4", help="runs at a time, beside one alone")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, per row")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("options", nargs="*", help="further options of negchain train, after --")
    given = parser.parse_args()
    preset = ["--preset", given.preset] if given.preset else []
    arguments = [*preset, "--data", given.data, *given.options]
    counts = [int(count) for count in given.jobs.split(",")]
    rows = measure(arguments, counts, seconds=given.seconds, say=lambda s: print(s, flush=True))
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{hardware}, torch {torch.__version__}, negchain train {' '.join(arguments)}\n")
    print("| runs | sharing | all / one alone | images/s, all | each |\n|---|---|---|---|---|")
    for row in rows:
        each = ", ".join(f"{rate:,.0f}" for rate in row.rates)
        print(f"| {row.jobs} | {row.sharing} | {row.ratio:.2f} | {sum(row.rates):,.0f} | {each} |")
    if given.json:
        record = {"hardware": hardware, "torch": torch.__version__, "arguments": arguments}
        record |= {"seconds": given.seconds, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
