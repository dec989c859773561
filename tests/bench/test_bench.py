"""`negchain bench`: what it measures, records and refuses; its sums, not its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import negchain
from negchain import bench, methods
from negchain.augment import augmentation
from negchain.bench import losses, record, runs, timing, training
from negchain.weights.metropolis import Scan, mh_scan
from tool_runs import negchain as run

Capture = pytest.CaptureFixture[str]
CPU = torch.device("cpu")
QUICK = bench.Settings(device=CPU, quick=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("records")
    options = "bench --quick --device cpu --seed 3 --only"
    assert run(options, "tables,scan,trainer --out", out) == 0
    return next(out.glob("*.json"))


def page_of(measured: Path) -> str:
    return measured.with_suffix(".md").read_text()


def rows_of(measured: Path, subject: str) -> dict[str, Any]:
    plain = json.loads(measured.read_text())
    return {row["name"]: row for row in plain["tables"][subject]["rows"]}


# ---------------------------------------------------------------------- tables


@pytest.mark.slow
def test_every_method_has_a_step(tmp_path: Path) -> None:
    assert run("bench --quick --device cpu --only step --out", tmp_path) == 0
    rows = rows_of(next(tmp_path.glob("*.json")), "step")
    for name in methods.trained():
        assert f"{methods.METHODS[name].title}, small-cnn, b = 32" in rows
    assert "EMC², cached, small-cnn, b = 32" in rows
    assert rows["InfoNCE, small-cnn, b = 32"]["ratio"]["median"] == 1.0
    for row in rows.values():
        assert 0 < row["value"]["low"] <= row["value"]["median"] <= row["value"]["high"]
        assert row["unit"] == "ms" and row["against"] == "InfoNCE"
    assert rows["augmentation alone, small-cnn, b = 32"]["ratio"]["median"] < 1
    assert "augmentation alone, crops of whole pictures, small-cnn, b = 32" in rows


def test_the_trainer_stands_against_the_usual_way(measured: Path) -> None:
    rows = rows_of(measured, "trainer")
    base = rows.pop("the usual way, InfoNCE, b = 32")
    assert base["ratio"] is None and base["value"]["low"] > 0
    assert list(rows) == ["negchain, InfoNCE, b = 32", "negchain, EMC², b = 32"]
    assert all(row["unit"] == "images/s" and row["value"]["low"] > 0 for row in rows.values())


def test_the_scan_equals_the_loop(measured: Path) -> None:
    rows = rows_of(measured, "scan")
    assert list(rows) == [f"{n}, b = {b}" for b in losses.BATCHES for n in ("the loop", "torch")]
    assert "* equal: torch equals the loop to the last bit, b = 32" in page_of(measured)


def test_state_is_one_integer_per_sample(measured: Path) -> None:
    rows = rows_of(measured, "tables")
    held = {name: row["value"]["median"] for name, row in rows.items() if row["unit"] == "bytes"}
    assert held["state per sample, up to 2^31 samples"] == 4.0
    assert held["state per sample, beyond 2^31 samples"] == 8.0


def test_losses_of_every_kind_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "BATCHES", (8,))
    monkeypatch.setattr(losses, "CHECKED_SIZE", 32)
    table = bench.measure("losses", QUICK)
    names = [row.name for row in table.rows]
    assert names == [f"{m.title}, b = 8" for m in methods.METHODS.values()]
    assert table.rows[0].ratio == record.Spread(1.0, 1.0, 1.0)
    assert len(table.checks) == 3 and all(check.ok for check in table.checks)


def test_measuring_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(settings: bench.Settings) -> record.Table:
        torch.manual_seed(5)
        torch.set_num_threads(2)
        return record.Table(title="", compares="", rows=())

    monkeypatch.setitem(bench.SUBJECTS, "scan", careless)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    bench.measure("scan", QUICK)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------- sums


def test_ratios_are_formed_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    slow = [1.0]

    def spend(seconds: float) -> None:
        now[0] += seconds * slow[0]
        slow[0] *= 1.01  # a machine that gets ever slower

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    timed = {
        "a": timing.Timed(lambda: spend(0.01), CPU),
        "b": timing.Timed(lambda: spend(0.03), CPU),
    }
    times = timing.interleaved(timed, rounds=9, window_ms=1.0)
    row = record.Row.of("b", times["b"], "ms", base=times["a"])
    assert row.ratio is not None and row.ratio.median == pytest.approx(3, rel=0.02)
    assert row.value.high > 1.05 * row.value.low  # what the ratio does not see


def test_short_calls_are_repeated_until_the_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]

    def spend() -> None:
        now[0] += 0.001
        calls[0] += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    times = timing.interleaved({"a": timing.Timed(spend, CPU)}, rounds=2, window_ms=20.0)
    assert times["a"] == pytest.approx([1.0, 1.0])
    assert calls[0] == timing.WARM_UP + 1 + 2 * 20


# ---------------------------------------------------------------------- the usual way


def test_the_usual_way_has_the_same_recipe() -> None:
    augment = augmentation("simclr-stl10", size=96)
    steps_: list[Any] = list(training.transforms(augment).transforms)  # type: ignore[attr-defined]
    names = [type(step).__name__ for step in steps_]
    assert names == ["RandomResizedCrop", "RandomHorizontalFlip", "ToDtype", "RandomApply",
                     "RandomGrayscale", "GaussianBlur"]  # fmt: skip
    jitter, blur = steps_[3].transforms[0], steps_[5]
    assert jitter.brightness == (pytest.approx(0.2), 1.8) and jitter.hue == (-0.2, 0.2)
    assert tuple(blur.kernel_size) == (9, 9) and tuple(blur.sigma) == (0.1, 2.0)


def test_the_usual_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WORKERS", 1)
    data = runs.pictures(QUICK)
    chosen = runs.config(QUICK, 32, {"method": "infonce"}, {})
    encoder = training.build_run_encoder(chosen, data)
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    augment = training.run_augmentation(chosen, data)
    assert data.pretrain.images is not None
    batches = training.batches(data.pretrain.images, augment, 32, pin=False)
    views = next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert views[0].shape == (32, 1, 8, 8) and views[0].dtype == torch.float32
    assert 0 <= views[0].min() and views[0].max() <= 1 and not torch.equal(*views)
    found = []
    for _ in range(15):
        training.usual_step(encoder, optimizer, views, 14.28)
        z_a, z_b = encoder(torch.cat(views)).detach().chunk(2)
        found.append(float(losses.info_nce(z_a, z_b, 14.28)))
    assert found[-1] < 0.8 * found[0]


# ---------------------------------------------------------------------- large batches


def test_inputs_are_not_rounded(rng: torch.Generator) -> None:
    z = losses.clustered(64, 512, rng)
    half = z.bfloat16()
    assert torch.equal(half.float() @ half.float().T, (z.double() @ z.double().T).float())
    inside = (z @ z.T).fill_diagonal_(0).max(1).values
    assert 0.1 < inside.mean() < 0.9  # clusters, neither flat nor trivial


@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_a_fast_loss_that_draws_otherwise_is_found(kernel: Any) -> None:
    given = losses.inputs(QUICK, 64, 16, 1000)
    for seed in (0, 1):
        pair = [negchain.EMC2Loss(1000, 14.28, kernel, seed=s) for s in (0, seed)]
        assert losses.check("", *pair, given, 1e-3).ok is (seed == 0)


def test_large_batches_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "NUM_LARGE", 2000)
    monkeypatch.setattr(losses, "LARGE_DIM", 16)
    monkeypatch.setattr(losses, "CHECKED_SIZE", 64)
    monkeypatch.setattr(losses, "CPU_SIZES", (128,))
    monkeypatch.setattr(bench.Settings, "rounds", 1)
    monkeypatch.setattr(bench.Settings, "window_ms", 0.1)
    table = bench.measure("large", QUICK)
    assert len(table.checks) == 5 and all(check.ok for check in table.checks), table.checks
    names = [row.name for row in table.rows]
    assert "MH, shared views, shared views, B = 128" in names
    assert [n for n in names if n.startswith("i-SIR")] == [
        "i-SIR, paired views, B = 128", "i-SIR, all weights, paired views, B = 128"
    ]  # fmt: skip


# ---------------------------------------------------------------------- records


def test_a_record_says_where_and_what(measured: Path) -> None:
    plain = json.loads(measured.read_text())
    assert plain["commit"] and plain["versions"]["torch"] == torch.__version__.split("+")[0]
    assert plain["seed"] == 3 and plain["quick"] is True and "core" in plain["hardware"]
    assert plain["command"] == "negchain bench --only tables,scan,trainer --device cpu --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_bench_cpu\.json", measured.name)
    for table in plain["tables"].values():
        assert f"## {table['title']}" in page_of(measured)


def test_no_record_is_overwritten(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = record.new_path(tmp_path, "2026-11-15", CPU)
        record.Record.new(CPU, "negchain bench", seed=0, quick=True).write(path)
        names.append(path.name)
    stem = "2026-11-15_bench_cpu"
    assert names == [f"{stem}.md", f"{stem}-2.md", f"{stem}-3.md"]


def test_a_mismatch_ends_in_status_1(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Scan:
        found = mh_scan(*arguments)
        return found._replace(last=found.last.where(found.last != found.last.max(), 0))

    monkeypatch.setattr(losses, "mh_scan", wrong)
    monkeypatch.setattr(losses, "BATCHES", (32,))
    assert run("bench --quick --device cpu --only scan --out", tmp_path) == 1
    said = capsys.readouterr()
    assert "mismatch: torch equals the loop to the last bit, b = 32" in said.err
    assert "MISMATCH" in said.out and "**MISMATCH**" in next(tmp_path.glob("*.md")).read_text()


def test_a_table_that_fails_leaves_the_others(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: bench.Settings) -> record.Table:
        raise RuntimeError("out of memory")

    row = record.Row.of("b", [2.0], "ms")
    fine = record.Table(title="Fine", compares="b", rows=(row,))
    monkeypatch.setitem(bench.SUBJECTS, "scan", broken)
    monkeypatch.setitem(bench.SUBJECTS, "tables", lambda settings: fine)
    assert run("bench --quick --device cpu --only scan,tables --out", tmp_path / "new") == 1
    said = capsys.readouterr()
    assert "failed: scan: RuntimeError: out of memory" in said.err and "Fine" in said.out
    plain = json.loads(next((tmp_path / "new").glob("*.json")).read_text())
    assert list(plain["tables"]) == ["tables"] and list(plain["failed"]) == ["scan"]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--only scna", "did you mean 'scan'"),
        ("--device gpu", "--device must be one of auto, cpu, cuda"),
        ("--seed -2", "--seed must be from 0"),
        ("extra", "extra"),
    ],
)
def test_what_cannot_work_is_refused(
    words: str, says: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("bench", words) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and len(said.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_names_every_option_and_table(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run("bench --help") == 0
    text = capsys.readouterr().out
    options = "--only --device --out --quick --seed".split()
    assert [word for word in (*options, *bench.SUBJECTS) if word not in text] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(capsys: Capture) -> None:
    assert run("bench --device cuda") == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    "only", ["scan", pytest.param("losses,large,tables,step", marks=pytest.mark.slow)]
)
def test_everything_is_measured_on_a_gpu(tmp_path: Path, only: str) -> None:
    assert run(f"bench --quick --device cuda --only {only} --out", tmp_path) == 0
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(found["tables"]) == only.split(",") and not found["failed"]
