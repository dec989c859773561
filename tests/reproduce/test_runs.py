"""What `reproduce.runs` measures of a run."""

from __future__ import annotations

import statistics
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negchain.reproduce import accuracy, cost, pages, plan, runs, theory
from negchain.reproduce.common import Options, Row, append, read_rows

MIB = 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="by a GPU's own allocator there")
def test_peak_memory_is_what_a_step_holds_at_once(monkeypatch) -> None:
    """A run of known sizes: 8 MiB stay, a step takes 20 for a while; 50 were gone before it."""

    class Step:
        def __call__(self, number: int, batch: Any) -> None:
            first = torch.empty(12 * MIB, dtype=torch.uint8)
            second = torch.empty(8 * MIB, dtype=torch.uint8)
            del first, second
            torch.empty(16 * MIB, dtype=torch.uint8)

    @contextmanager
    def prepared(job: Any):
        torch.empty(50 * MIB, dtype=torch.uint8)
        kept = torch.empty(8 * MIB, dtype=torch.uint8)
        order = SimpleNamespace(batch=lambda number: None)
        task = SimpleNamespace(num_samples=9)
        yield SimpleNamespace(step=Step(), order=order, task=task, kept=kept), False

    monkeypatch.setattr(runs, "prepared", prepared)
    monkeypatch.setattr(runs, "images_of", lambda config: None)
    found = runs.peak_memory({"settings": {"device": "cpu"}, "method": "infonce", "seed": 0})
    assert found["device"] == "CPU" and found["images"] == 9
    assert found["peak_bytes"] == pytest.approx(28 * MIB, abs=2**16)


def test_the_table_of_memory_is_beside_infonce() -> None:
    jobs = [job for job in cost.jobs(Options(quick=True)) if job["kind"] == "memory"]
    rows = [{"job": job, "peak_bytes": (1 + i % 7) * MIB, "device": "CPU", "images": 9}
            for i, job in enumerate(jobs)]  # fmt: skip
    lines = [line.split(" | ") for line in cost.table(rows).splitlines()[2:]]
    assert [line[4] for line in lines[:7]] == [f"{k}.00" for k in range(1, 8)]
    assert [float(line[3]) for line in lines[:7]] == list(range(1, 8))


def test_memory_is_beside_nothing_where_infonce_was_not_measured() -> None:
    """It was beside itself, 1.00."""
    job = {"kind": "memory", "setting": "b32-none-both", "seed": 0, "settings": {}}
    row = {"job": {**job, "method": "emc2"}, "peak_bytes": MIB, "device": "CPU", "images": 9}
    assert cost.table([row]).endswith("| b32-none-both | 9 | EMC² | 1 | – | CPU |")


@pytest.mark.parametrize(
    ("methods", "bytes_per_item", "encodes"),
    [(("infonce", "dcl"), 0, 2), (("sogclr",), 4, 2), (("emc2", "isir"), 4, 3),
     (("negcache", "informed"), 4 * cost.DIM, 3)],
)  # fmt: skip
def test_state_and_encodes_are_those_of_table_1(
    methods: tuple[str, ...], bytes_per_item: int, encodes: int
) -> None:
    """In bytes per item (but for some hundred in all), and in batches."""
    for method in methods:
        for m, b in ((1000, 8), (3000, 32)):
            found = cost.work({"kind": "state", "method": method, "m": m, "b": b}, 0)
            assert 0 <= found["state_bytes"] - m * bytes_per_item < 100
            assert found["encodes"] == encodes * b
            table = method in ("negcache", "informed")
            assert found["encodes_without_gradient"] == (m // 100 if table else 0)


def clocked(clock: list[float]) -> Any:
    """A run of 8 steps of a second each, for samples of 4, which is judged in 100 seconds."""

    class Run(SimpleNamespace):
        def advance(self, batch: Any) -> None:
            self.done += 1
            clock[0] += 1

    def judged(encoder: Any) -> Row:
        clock[0] += 100
        return {"probe": 0.5}

    judge = SimpleNamespace(quick=judged, thorough=lambda encoder: (judged(encoder), None))
    step = SimpleNamespace(loss=torch.tensor(2.0), loss_fn=SimpleNamespace(info={}))
    order, task = SimpleNamespace(batch=lambda number: None), SimpleNamespace(num_samples=9)
    return Run(
        done=0, total_steps=8, order=order, step=step, judge=judge, encoder=None, task=task,
        config=SimpleNamespace(batch_size=4, data="digits"), device=torch.device("cpu"),
    )  # fmt: skip


def test_a_curve_counts_samples_and_the_seconds_of_training_alone(monkeypatch) -> None:
    clock = [0.0]
    times = SimpleNamespace(perf_counter=lambda: clock[0], time=lambda: 0.0)
    monkeypatch.setattr(runs, "time", times)
    monkeypatch.setattr(runs, "prepared", lambda job: nullcontext((clocked(clock), False)))
    curve = runs.train({}, deadline=1.0)["curve"]
    assert [(p["step"], p["samples"], p["seconds"]) for p in curve] == [
        (step, 4 * step, float(step)) for step in (1, 2, 4, 6, 8)
    ]


def test_a_training_run_has_its_jobs_seed() -> None:
    settings = {"data": "digits", "batch_size": 4, "subset": 300, "device": "cpu"}
    losses = []
    for seed in (0, 1, 1):
        job = {"method": "dcl", "seed": seed, "settings": settings}
        with runs.prepared(job) as (run, _):
            run.step(0, run.order.batch(0))
            losses.append(float(run.step.loss))
        assert run.config.seed == seed
    assert losses[0] != losses[1] == losses[2]


def test_the_time_of_a_step_is_without_its_warm_up(monkeypatch) -> None:
    measured = iter([90.0, 5.0, 1.0, 4.0, 2.0, 3.0])
    monkeypatch.setattr(runs, "prepared", lambda job: nullcontext((clocked([0.0]), False)))
    monkeypatch.setattr(runs, "stepper", lambda run: lambda: None)
    monkeypatch.setattr(runs, "milliseconds", lambda timed, count: next(measured))
    assert runs.time_steps({}, 20)["ms"] == [1.0, 2.0, 3.0, 4.0, 5.0]


def run_of(method: str, record: str, probe: float, **more: Any) -> Row:
    job = {"seed": 0, "setting": "b32-none", "method": method, "settings": {}, **more}
    curve = [{"step": 0, "probe": 0.1, "knn1": 0.1, "embedding_variance": 0.5},
             {"step": 10, "probe": probe, "knn1": 0.2, "embedding_variance": 0.5}]  # fmt: skip
    return {"job": job, "record": record, "curve": curve, "config": {"epochs": 2, "images": 9}}


def steps_of(method: str, **more: Any) -> Row:
    job = {"kind": "step", "setting": "b32-none", "seed": 0, "settings": {}, "method": method}
    return {"job": job, "record": "cost", "ms": [2.0], **more}


@pytest.mark.parametrize("known", [{}, {"images": 9}])
def test_records_of_before_rows_had_their_number_of_images_are_shown(known: Row) -> None:
    """They ended in KeyError: 'images', so an old record could not be drawn or gone on with."""
    steps = [steps_of("infonce", **known), steps_of("emc2", **known)]
    peak = {"job": {**steps[0]["job"], "kind": "memory"}, "peak_bytes": MIB, "device": "CPU"}
    lines = cost.table([*steps, {**peak, **known}]).splitlines()
    size = known.get("images", "–")
    assert f"| b32-none | {size} | InfoNCE | 1 | 1.00 | CPU |" in lines
    assert f"| b32-none | {size} | EMC² | 2.00 | 1.00 |" in lines
    state = {"kind": "state", "method": "emc2", "m": 10_000, "b": 32}
    assert list(cost.draw([{"job": state, "state_bytes": 40_000}, *steps])) == ["cost"]
    runs = [run_of("infonce", "stl10", 0.5), run_of("emc2", "stl10", 0.6)]
    assert len(cost.in_seconds([*steps, *runs])) == 2


def test_a_run_that_ended_as_before_to_the_last_digit_counts_once() -> None:
    """On a CPU the run that is made again is the same one: it was 2 of 2, ± 0.0."""
    rows = [steps_of("infonce"), steps_of("emc2"), run_of("infonce", "stl10", 0.5)]
    rows += [run_of("emc2", "stl10", 0.6), run_of("emc2", "burn-in", 0.6, **{"burn-in": "ours"})]
    assert [row["record"] for row in cost.in_seconds(rows)] == ["stl10", "stl10"]
    rows[-1] = run_of("emc2", "burn-in", 0.61, **{"burn-in": "ours"})  # as on a GPU
    assert [row["record"] for row in cost.in_seconds(rows)] == ["stl10", "stl10", "burn-in"]


def test_a_figure_shows_what_its_name_says() -> None:
    """Runs that end with a probe of .5 and .6, and with 1-NN of .2."""
    rows = [run_of("infonce", "stl10", 0.5), run_of("emc2", "stl10", 0.6)]
    for row in rows:
        for point in row["curve"]:
            point["samples"] = 32 * point["step"]
    timed = cost.time_draw([steps_of("infonce"), steps_of("emc2"), *rows])
    counted = accuracy.draw("stl10", "method", rows)
    wanted = {"time-probe": (0.5, 0.6), "time-knn1": (0.2, 0.2),
              "stl10-probe": (0.5, 0.6), "stl10-1nn": (0.2, 0.2)}  # fmt: skip
    for name, figure in {**timed, **counted}.items():
        (axis,) = figure.axes
        assert tuple(line.get_ydata()[-1] for line in axis.lines) == wanted.pop(name)
    assert not wanted


ROOT = Path(__file__).parents[2]
METHODS = ("infonce", "dcl", "sogclr", "emc2", "isir", "negcache", "informed")
SETTINGS = ("b32-none", "b32-batch", "b256-none", "b256-batch")


def what_is_said_of_cost() -> str:
    return " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())


def test_what_is_said_of_memory_is_in_the_record() -> None:
    page = what_is_said_of_cost()
    rows = pages.where(read_rows(ROOT / "records/reproduce/cost.jsonl"), kind="memory")
    peak = {(r["device"].split()[-1], r["job"]["setting"], r["images"], r["job"]["method"]):
            r["peak_bytes"] / MIB for r in rows}  # fmt: skip
    assert len(peak) == len(rows) == 14 + 6 * 7 + 2 * 2  # and both views, of EMC² and i-SIR

    def ratio(device: str, setting: str, method: str = "emc2") -> str:
        mine, least = (peak[device, setting, 12_000, m] for m in (method, "infonce"))
        return f"{mine / least:.2f}"

    def more(setting: str, images: int, method: str, second: str = "infonce") -> float:
        mine, least = (peak["H200", setting, images, m] for m in (method, second))
        return mine - least

    found = [ratio("CPU", name) for name in ("b32-none", "b32-batch", "b256-none")]
    assert "EMC²'s is {} times InfoNCE's at b = 32, {} times with".format(*found) in page
    assert f"BatchNorm, and {found[2]} times at b = 256" in page
    sizes = (520, 12_000, 100_000)
    assert "EMC² takes 51 to 55 MiB more than InfoNCE at b = 32 without normalisation" in page
    extra = [more("b32-none", images, "emc2") for images in sizes]
    assert (round(min(extra)), round(max(extra))) in ((51, 55), (51, 54))
    assert "At b = 256 it takes 418 MiB more, 1.27 times (i-SIR 322, 1.21 times)" in page
    for method, told in (("emc2", (418, "1.27")), ("isir", (322, "1.21"))):
        size = round(more("b256-none", 12_000, method))
        assert (size, ratio("H200", "b256-none", method)) == told
    assert "Negative Cache takes 98, 153 and 1,172 MiB more with 520, 12,000 and 100,000" in page
    assert [round(more("b32-none", images, "negcache")) for images in sizes] == [98, 153, 1172]
    assert "one may have 32 MiB more, or 96 at b = 256: InfoNCE and DCL with BatchNorm" in page
    assert round(-more("b32-batch", 12_000, "dcl")) == 32
    assert round(more("b256-none", 12_000, "emc2", "isir")) == 96
    for images in sizes:
        assert all(abs(more("b32-none", images, m)) < 2.1 for m in ("dcl", "sogclr"))


def test_what_is_said_of_a_steps_time_is_in_the_record() -> None:
    page = what_is_said_of_cost()
    rows = pages.where(read_rows(ROOT / "records/reproduce/cost.jsonl"), kind="step")
    ms = {(r["job"]["setting"], r["images"], r["job"]["method"]): statistics.median(r["ms"])
          for r in rows}  # fmt: skip
    assert len(ms) == len(rows) == 4 * 7 + 2 * 7 + 2 * 2

    def ratio(setting: str, method: str, images: int = 12_000) -> float:
        return round(ms[setting, images, method] / ms[setting, images, "infonce"], 2)

    assert "A step takes 1.11 times InfoNCE's at b = 32 and 1.32 times at b = 256, with" in page
    assert "BatchNorm 1.13 and 1.37 (i-SIR 1.17 and 1.36, 1.16 and 1.38; DCL and SogCLR" in page
    order = ("b32-none", "b256-none", "b32-batch", "b256-batch")
    assert [ratio(name, "emc2") for name in order] == [1.11, 1.32, 1.13, 1.37]
    assert [ratio(name, "isir") for name in order] == [1.17, 1.36, 1.16, 1.38]
    assert {ratio(name, m) for name in SETTINGS for m in ("dcl", "sogclr")} == {0.99, 1.0}
    sizes = (520, 12_000, 100_000)
    for method, least, most in (("emc2", 1.15, 1.17), ("infonce", 1.03, 1.04)):
        times = [round(ms["b32-none", images, method], 2) for images in sizes]
        assert (min(times), max(times)) == (least, most)
        assert f"{least} to {most} ms" in page
    assert "2.5, 3.0 and 6.5 times InfoNCE's time" in page
    told = [round(ratio("b32-none", "negcache", images), 1) for images in sizes]
    assert told == [2.5, 3.0, 6.5]
    assert "a step takes 2.7 times EMC²'s, because it encodes 1 % of the data anew" in page
    assert round(ms["b32-none", 12_000, "negcache"] / ms["b32-none", 12_000, "emc2"], 1) == 2.7
    both = [ms[name, 12_000, "emc2"] for name in ("b32-none-both", "b32-none")]
    assert "A step takes 1.16 ms with them and 1.15 ms with one" in page
    assert [round(value, 2) for value in both] == [1.16, 1.15]


def test_a_record_whose_last_line_has_no_end_goes_on_with_a_line_of_its_own(tmp_path: Path) -> None:
    """As editors leave it that delete a line, which the refusal of a torn one asks for."""
    path = tmp_path / "theory.jsonl"
    path.write_text('{"job": {"seed": 0}}')
    append(path, {"job": {"seed": 1}})
    append(path, {"job": {"seed": 2, "data": "Größe"}})
    assert [row["job"]["seed"] for row in read_rows(path)] == [0, 1, 2]
    assert path.read_bytes().count(b"\n") == 3


def test_a_run_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    options = Options(quick=True)
    cut, ended, *_ = jobs = [{**job, "quick": True} for job in theory.jobs(options)]
    append(tmp_path / "theory.jsonl", {"job": cut, "complete": False})
    append(tmp_path / "theory.jsonl", {"job": ended, "complete": True})
    waiting = [job for _, job in plan.missing(["theory"], options, tmp_path)]
    assert cut in waiting and ended not in waiting and len(waiting) == len(jobs) - 1
