"""`negchain bench`: what it measures, records and refuses; its sums, not its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_runs import negchain as run

import negchain
from negchain import bench, methods
from negchain.augment import augmentation
from negchain.bench import equality, large, record, runs, scan, steps, timing, usual
from negchain.fast.encoder import CopyingEncoder, accelerate
from negchain.weights.metropolis import Scan, mh_scan

Capture = pytest.CaptureFixture[str]
CPU = torch.device("cpu")
QUICK = bench.Settings(device=CPU, quick=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("records")
    options = "bench --quick --device cpu --seed 3 --only"
    assert run(options, "tables,scan,step,trainer --out", out) == 0
    return next(out.glob("*.json"))


# ---------------------------------------------------------------------- tables


def test_every_method_has_a_step(measured: Path) -> None:
    table = record.read(measured).table("step")
    assert table is not None
    names = [row.name for row in table.rows]
    for name in methods.trained():
        assert f"{methods.METHODS[name].title}, small-cnn, b = 32" in names
    assert "EMC², cached, small-cnn, b = 32" in names
    ratios = {row.name: row.ratio for row in table.rows}
    assert ratios["InfoNCE, small-cnn, b = 32"] == bench.Spread(1.0, 1.0, 1.0)
    for row in table.rows:
        assert row.ratio is not None and 0 < row.value.low <= row.value.median <= row.value.high
        assert row.unit == "ms"
    part = ratios[f"{steps.AUGMENTATION}, small-cnn, b = 32"]
    assert part is not None and part.median < 1


def test_the_trainer_stands_against_the_usual_way(measured: Path) -> None:
    table = record.read(measured).table("trainer")
    assert table is not None
    base, *ours = table.rows
    assert base.name == "the usual way, InfoNCE, b = 32" and base.ratio is None
    assert [row.name for row in ours] == [
        "negchain, InfoNCE, b = 32",
        "negchain, EMC², b = 32",
    ]
    assert all(row.unit == "images/s" and row.value.low > 0 for row in table.rows)


def test_the_scan_is_a_speed_up_and_equal(measured: Path) -> None:
    table = record.read(measured).table("scan")
    assert table is not None and len(table.checks) == 2 and not table.mismatches
    for row in table.rows:
        if row.ratio is not None:
            loop = next(r for r in table.rows if r.name.endswith(row.name.split(", ")[1]))
            assert row.ratio.median == pytest.approx(loop.value.median / row.value.median, rel=0.5)


def test_state_is_one_integer_per_sample(measured: Path) -> None:
    table = record.read(measured).table("tables")
    assert table is not None
    held = {row.name: row.value.median for row in table.rows if row.unit == "bytes"}
    assert held["state per sample, up to 2^31 samples"] == 4.0
    assert held["state per sample, beyond 2^31 samples"] == 8.0


def test_losses_of_every_kind_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.losses, "CASES", ((32, 14.28),))
    table = bench.measure("losses", QUICK)
    names = [row.name for row in table.rows]
    assert names == [f"{m.title}, b = 32, β = 14.28" for m in methods.METHODS.values()]
    assert table.rows[0].ratio == bench.Spread(1.0, 1.0, 1.0)
    assert len(table.checks) == 3 and not table.mismatches


def test_measuring_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(settings: bench.Settings) -> bench.Table:
        torch.manual_seed(5)
        torch.set_num_threads(2)
        return bench.Table(subject="scan", title="", compares="", rows=())

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
    row = bench.Row.of("b", times["b"], "ms", base=times["a"])
    assert row.ratio is not None and row.ratio.median == pytest.approx(3, rel=0.02)
    assert row.value.high > 1.05 * row.value.low  # what the ratio does not see
    fast = bench.Row.of("a", times["a"], "ms", base=times["b"], speed_up=True)
    assert fast.ratio is not None and fast.ratio.median == pytest.approx(3, rel=0.02)


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
    steps_: list[Any] = list(usual.transforms(augment).transforms)  # type: ignore[attr-defined]
    names = [type(step).__name__ for step in steps_]
    assert names == ["RandomResizedCrop", "RandomHorizontalFlip", "ToDtype", "RandomApply",
                     "RandomGrayscale", "GaussianBlur"]  # fmt: skip
    jitter, blur = steps_[3].transforms[0], steps_[5]
    assert jitter.brightness == (pytest.approx(0.2), 1.8) and jitter.hue == (-0.2, 0.2)
    assert tuple(blur.kernel_size) == (9, 9) and tuple(blur.sigma) == (0.1, 2.0)
    image = torch.randint(256, (3, 96, 96), dtype=torch.uint8)
    first, second = usual.TwoViews(image[None], usual.transforms(augment))[0]
    assert first.shape == (3, 96, 96) and first.dtype == torch.float32
    assert 0 <= first.min() and first.max() <= 1 and not torch.equal(first, second)


def test_the_usual_step_trains() -> None:
    data = runs.pictures(QUICK)
    chosen = runs.config(QUICK, 32, runs.VARIANTS[runs.BASE], {})
    encoder = bench.throughput.build_run_encoder(chosen, data)
    step = usual.UsualStep(encoder, beta=14.28, lr=1e-3, weight_decay=0.0, bf16=False)
    assert data.pretrain.images is not None
    pixels = data.pretrain.images[:32].float() / 255
    views = (pixels, pixels.flip(3))
    losses = []
    for _ in range(15):
        step(views)
        z_a, z_b = encoder(torch.cat(views)).detach().chunk(2)
        losses.append(float(usual.info_nce(z_a, z_b, 14.28)))
    assert losses[-1] < 0.8 * losses[0]


# ---------------------------------------------------------------------- streaming


def test_exact_inputs_are_not_rounded(rng: torch.Generator) -> None:
    z = equality.exact_clustered(64, 512, 4, 1.0, rng)
    half = z.bfloat16()
    assert torch.equal(half.float() @ half.float().T, (z.double() @ z.double().T).float())
    inside = (z @ z.T).fill_diagonal_(0).max(1).values
    assert 0.1 < inside.mean() < 0.9  # clusters, neither flat nor trivial


@pytest.mark.parametrize("case", [large.CASES[0], large.CASES[2]], ids=["mh", "isir"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_streaming_loss_that_draws_otherwise_is_found(
    case: large.Case, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(self: large.Case, size: int, *, streaming: bool) -> negchain.EMC2Loss:
        settings: dict[str, Any] = {"kernel": self.kernel, "views": self.views, "symmetric": False}
        return negchain.EMC2Loss(1000, self.beta, seed=int(streaming and different), **settings)

    monkeypatch.setattr(large, "NUM_SAMPLES", 1000)
    monkeypatch.setattr(large, "CHECKED_SIZE", 64)
    monkeypatch.setattr(large.Case, "loss", loss)
    for different in (False, True):
        assert large._check(QUICK, case, exact).ok is not different


# ---------------------------------------------------------------------- records


def test_a_record_says_where_and_what(measured: Path, capsys: Capture) -> None:
    plain = json.loads(measured.read_text())
    assert plain["commit"] and plain["versions"]["torch"] == torch.__version__.split("+")[0]
    assert plain["seed"] == 3 and plain["quick"] is True and "cores" in plain["hardware"]
    assert plain["command"] == "negchain bench --only tables,scan,step,trainer --device cpu --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_bench_cpu\.json", measured.name)
    text = measured.with_suffix(".md").read_text()
    assert text == record.page(record.read(measured))
    capsys.readouterr()
    assert run("bench --show", measured) == 0
    shown = capsys.readouterr().out
    for table in record.read(measured).tables:
        assert f"## {table.title}" in text and table.title in shown
        assert all(check.name in text for check in table.checks)


def test_no_record_is_overwritten(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = record.new_path(tmp_path, "2026-11-15", CPU)
        record.write(path, record.new_record(CPU, "negchain bench", seed=0, quick=True))
        names.append(path.name)
    stem = "2026-11-15_bench_cpu"
    assert names == [f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"]


def test_a_mismatch_ends_in_status_1(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any, **settings: Any) -> Scan:
        found = mh_scan(*arguments, **settings)
        return found._replace(last=found.last.where(found.last != found.last.max(), 0))

    monkeypatch.setattr(scan, "mh_scan", wrong)
    monkeypatch.setattr(scan, "BATCHES", (32,))
    assert run("bench --quick --device cpu --only scan --out", tmp_path) == 1
    said = capsys.readouterr()
    assert "mismatch: torch equals the loop to the last bit, b = 32" in said.err
    assert "MISMATCH" in said.out and "**MISMATCH**" in next(tmp_path.glob("*.md")).read_text()


def test_a_table_that_fails_leaves_the_others(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: bench.Settings) -> bench.Table:
        raise RuntimeError("out of memory")

    row = bench.Row.of("b", [2.0], "ms")
    fine = bench.Table(subject="tables", title="Fine", compares="b", rows=(row,))
    monkeypatch.setitem(bench.SUBJECTS, "scan", broken)
    monkeypatch.setitem(bench.SUBJECTS, "tables", lambda settings: fine)
    assert run("bench --quick --device cpu --only scan,tables --out", tmp_path / "new") == 1
    said = capsys.readouterr()
    assert "failed: scan: RuntimeError: out of memory" in said.err and "Fine" in said.out
    found = record.read(next((tmp_path / "new").glob("*.json")))
    assert found.tables == [fine] and list(found.failed) == ["scan"]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--only scna", "did you mean 'scan'"),
        ("--device gpu", "--device must be one of auto, cpu, cuda"),
        ("--seed -2", "--seed must be from 0"),
        ("--show nowhere.json", "nowhere.json cannot be read"),
        ("--show wrong.json", "wrong.json is no record of negchain bench"),
        ("--show list.json", "list.json is no record of negchain bench"),
        ("extra", "extra"),
    ],
)
def test_what_cannot_work_is_refused(
    words: str, says: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"format": 1, "tables": [{}]}')
    Path("list.json").write_text("[1, 2]")
    record.write(Path("record.json"), record.new_record(CPU, "", seed=0, quick=True))
    before = sorted(tmp_path.iterdir())
    assert run("bench", words) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and len(said.err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_help_names_every_option_and_table(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run("bench --help") == 0
    text = capsys.readouterr().out
    options = "--only --device --out --quick --large --seed --show".split()
    assert [word for word in (*options, *bench.SUBJECTS) if word not in text] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(capsys: Capture) -> None:
    assert run("bench --device cuda") == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    only = "scan,losses,large,tables,step"
    assert run(f"bench --quick --device cuda --only {only} --out", tmp_path) == 0
    found = record.read(next(tmp_path.glob("*.json")))
    assert [table.subject for table in found.tables] == only.split(",")
    assert not found.mismatches and not found.failed


@pytest.mark.parametrize(
    ("planted", "shape", "factor"),
    [
        ("nothing", None, 1.0),
        ("all gradients too large", None, 1.2),
        ("one missing", (128, 256), 0.0),  # of the first linear layer
        ("one too large", (64, 128), 1.1),  # the projector's, which bf16 hardly rounds
    ],
)
def test_a_fast_step_with_another_gradient_is_found(
    planted: str, shape: tuple[int, ...] | None, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's first steps hide the size of a gradient from the losses, not from its moments."""
    collect = CopyingEncoder.collect

    def wrong(fast: CopyingEncoder, call: int, given: Any) -> list[Any]:
        found = collect(fast, call, given)
        return [factor * g if shape is None or g.shape == shape else g for g in found]

    monkeypatch.setattr(steps, "CHECKED_STEPS", 3)
    monkeypatch.setattr(CopyingEncoder, "collect", wrong)
    settings = bench.Settings(device=torch.device("cpu"), quick=True)
    data = runs.pictures(settings)
    given = {"carried": "cached", "precision": "bf16", "norm": "none"}
    chosen = runs.config(settings, 32, {"method": "emc2"}, given)
    with runs.prepared(chosen, data) as fast:
        made = accelerate(fast.encoder, torch.bfloat16, "blocks")
        fast.step.embed = {"anchors": made, "keys": made}
        check = steps._checked("", fast, data)
    assert check.ok is (planted == "nothing"), check.found
