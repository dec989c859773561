"""`negchain reproduce`: the paper's numbers reach the sampler, values are exact, records hold."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from torchvision.datasets import stl10

from negchain import reproduce
from negchain.cli import run
from negchain.data import ImageSet
from negchain.losses import walk
from negchain.methods import METHODS, LossSettings, named
from negchain.reproduce import accuracy, common, pages, plan, stationarity, theory
from negchain.reproduce.runs import config_of, train
from negchain.tasks import COLLAPSED
from negchain.tasks.images import ImageTask, load_images
from negchain.train.resolve import resolve
from negchain.train.step import build_loss as trainers_loss


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(R, P) of every row that is scanned."""
    seen: list[tuple[int, int]] = []
    real = walk.mh_scan

    def spy(logits, start, log_u, burn_in, *rest):  # type: ignore[no-untyped-def]
        steps = (logits > -math.inf).sum(1).tolist()
        skipped = burn_in.tolist() if isinstance(burn_in, torch.Tensor) else [burn_in] * len(steps)
        seen.extend(zip(steps, skipped, strict=True))
        return real(logits, start, log_u, burn_in, *rest)

    monkeypatch.setattr(walk, "mh_scan", spy)
    return seen


def visit(loss_fn, size: int, stored: bool = False) -> None:  # type: ignore[no-untyped-def]
    index, view = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    pair = (view, 1 - view) if stored else None
    z = torch.randn(2, size, 8)
    loss_fn(z[0], z[1], index, augmentation=pair, encode=lambda ids: torch.randn(len(ids), 8))


@pytest.mark.parametrize(("given", "found"), [({}, (6, 3)), ({"proposal": "batch"}, (3, 1))])
def test_the_subset_preset_has_the_papers_proposals_and_burn_in(
    given: dict, found: tuple, scans: list
) -> None:
    """R = 2b - 2 and P = b - 1 at b = 4; --proposal batch, one stored view, was not obeyed."""
    config = resolve("stl10-subset", {"data": "digits", "method": "emc2", **given})
    assert config.proposal == given.get("proposal", "both")
    task = ImageTask(config, load_images(config))
    encoder = SimpleNamespace(embedding_dim=8)
    visit(trainers_loss(task, encoder), config.batch_size, stored=True)
    assert set(scans) == {found}


@pytest.mark.parametrize(("preset", "steps"), [("stl10-subset", 3), ("stl10-b32", 31)])
def test_burn_in_of_the_command_line_reaches_the_scan(preset: str, steps: int, scans: list) -> None:
    """The paper's P as its table states it, of R = 2b - 2."""
    given = {"data": "digits", "method": "emc2", "burn_in": steps, "proposal": "both"}
    config = resolve(preset, given)
    task = ImageTask(config, load_images(config))
    loss_fn = trainers_loss(task, SimpleNamespace(embedding_dim=8))
    visit(loss_fn, config.batch_size, stored=config.augmentations is not None)
    assert set(scans) == {(2 * config.batch_size - 2, steps)}


def test_with_fresh_views_presets_propose_one_copy_which_is_ours(scans: list) -> None:
    """The paper's R = 62 and P = 31 are those of `reproduce burn-in`; see docs/results.md."""
    config = resolve("stl10-b32", {"data": "digits", "method": "emc2"})
    task = ImageTask(config, load_images(config))
    visit(trainers_loss(task, SimpleNamespace(embedding_dim=8)), config.batch_size)
    assert set(scans) == {(31, 15)}


def test_stationarity_has_the_papers_proposals_and_burn_in(scans: list) -> None:
    settings = LossSettings(500, 5.0, options=stationarity.OPTIONS)
    visit(named("emc2").build(settings), 4, stored=True)
    assert set(scans) == {(6, 3)}


@pytest.mark.parametrize(("size", "steps"), [(32, 31), (32, 0), (32, 48), (256, 255)])
def test_absolute_burn_in_reaches_the_scan(scans: list, size: int, steps: int) -> None:
    settings = {"preset": f"stl10-b{size}", "data": "digits"}  # which proposes one copy
    chain = {"burn_in": steps, "copies": 2}
    config = config_of({"settings": settings, "method": "emc2", "seed": 0, "chain": chain})
    task = ImageTask(config, load_images(config))
    visit(trainers_loss(task, SimpleNamespace(embedding_dim=8)), size)
    assert set(scans) == {(2 * size - 2, steps)}


def test_burn_in_runs_the_papers_four(scans: list) -> None:
    jobs = accuracy.burn_in(common.Options(data="somewhere"))
    found = {job["burn-in"]: job.get("chain", {}).get("burn_in") for job in jobs}
    assert found == {"P = 0": 0, "P = 16": 16, "P = 32": 32, "P = 48": 48, "ours": None}


def test_the_record_of_burn_in_says_what_ran() -> None:
    """Its rows of before 2026-11-18 have the preset's proposals and burn-in for all."""
    jobs = accuracy.burn_in(common.Options(quick=True, device="cpu"))
    found = {job["burn-in"]: train(job, time.time())["config"] for job in jobs}  # a step each
    told = {name: (config["proposal"], config["burn_in"]) for name, config in found.items()}
    paper = {f"P = {steps}": ("both", pytest.approx(steps / 30)) for steps in (0, 8, 16, 24)}
    assert told == {**paper, "ours": ("batch", 0.5)}


@pytest.mark.parametrize("name", [*accuracy.SETTINGS, *accuracy.IMAGENET])
def test_a_settings_name_says_what_is_run(name: str, scans: list) -> None:
    """Batch size (or pixels), norm, and "both" where both copies are proposed."""
    size, norm, *more = name.split("-")
    for known in (accuracy.SETTINGS, accuracy.IMAGENET):
        if name not in known:
            continue
        settings = {**known[name], "data": "digits"}
        config = config_of({"settings": settings, "method": "emc2", "seed": 0})
        assert config.norm == norm
        assert config.proposal == ("both" if "both" in more else "batch")
        if size == "224px":
            assert (config.image_size, config.batch_size) == (224, 256)
            continue
        batch = int(size.removeprefix("b"))
        assert config.batch_size == batch
        task = ImageTask(config, load_images(replace(config, image_size=8)))
        visit(trainers_loss(task, SimpleNamespace(embedding_dim=8)), batch)
        copies = 2 if "both" in more else 1
        assert {steps for steps, _ in scans} == {copies * (batch - 1)}
        if size == "b32" and norm == "batch":
            assert config.lr == (1e-4 if "slow" in more else 3e-4)


def test_numbers_of_stored_augmentations_differ() -> None:
    jobs = accuracy.finite_augmentations(common.Options(data="digits", seeds=1))
    cases: dict[tuple[str, str], list[int | None]] = {}
    for job in jobs:
        found = cases.setdefault((job["setting"], job["method"]), [])
        found.append(config_of(job).augmentations)
    for counts in cases.values():  # None: fresh ones
        assert len(set(counts)) == len(counts) > 2 and None in counts


def test_both_readings_of_simclr_are_run() -> None:
    jobs = accuracy.EXPERIMENTS["stl10"].jobs(common.Options(data="somewhere"))
    assert {"infonce", "dcl"} <= {job["method"] for job in jobs}
    assert {job["seed"] for job in jobs} == {0, 1, 2}


def test_stationarity_has_five_seeds_both_betas_and_the_floor() -> None:
    jobs = stationarity.jobs(common.Options(device="cpu"))
    assert {job["seed"] for job in jobs} == set(range(5))
    assert {job["beta"] for job in jobs} == {5.0, 14.28}
    assert (5.0, 1e-3) in {(job["beta"], job["lr"]) for job in jobs}  # the paper's
    assert {"infonce", "dcl", "isir", common.FULL} <= {job["method"] for job in jobs}
    assert {(job["images"], job["batch"]) for job in jobs} == {(500, 4)}


def test_stationarity_stores_views_and_keeps_its_step(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """It trains on and measures stored views, a pair may be one of them twice."""
    measured, encoded, pairs, rates = [], [], [], []  # type: ignore[var-annotated]
    exact, build, emc2 = stationarity.exact, stationarity.build, METHODS["emc2"]

    def spy_exact(encoder, views, beta):  # type: ignore[no-untyped-def]
        measured.append(views.clone())
        return exact(encoder, views, beta)

    def spy_encoder(*given):  # type: ignore[no-untyped-def]
        encoder = build(*given)
        encoder.register_forward_pre_hook(lambda _, args: encoded.append(args[0].detach().clone()))
        return encoder

    def spy_loss(settings):  # type: ignore[no-untyped-def]
        loss_fn = emc2.build(settings)
        loss_fn.register_forward_pre_hook(
            lambda _, args, named: pairs.append(named["augmentation"]), with_kwargs=True
        )
        return loss_fn

    class SGD(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    monkeypatch.setattr(stationarity, "exact", spy_exact)
    monkeypatch.setattr(stationarity, "build", spy_encoder)
    monkeypatch.setitem(METHODS, "emc2", replace(emc2, build=spy_loss))
    monkeypatch.setattr(torch.optim, "SGD", SGD)
    job = {"encoder": "mlp", "size": 8, "images": 12, "batch": 4, "data": "digits", "steps": 12}
    job |= {"seed": 0, "beta": 5.0, "lr": 0.01, "method": "emc2"}
    stationarity.work(job, time.time() + 60)
    stored = measured[0].flatten(0, 1)
    assert len(stored) == 24 and all(torch.equal(views, measured[0]) for views in measured)
    for rows in encoded:
        assert (rows[:, None] == stored).flatten(2).all(2).any(1).all()
    equal = torch.cat([first == second for first, second in pairs])
    assert 0 < int(equal.sum()) < len(equal)
    assert len(rates) == 12 and set(rates) == {0.01}


def test_exact_is_equation_1_over_all_pairs_of_views() -> None:
    torch.manual_seed(0)
    encoder, beta = nn.Linear(5, 3).double(), 5.0
    views = torch.randn(2, 4, 5, dtype=torch.float64)
    numbers = stationarity.exact(encoder, views, beta)
    z = normalize(encoder(views), dim=-1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        for g in range(2):
            for h in range(2):  # equal ones too
                others = [z[v, j] @ z[g, i] for v in range(2) for j in range(4) if j != i]
                total = total - beta * (z[g, i] @ z[h, i])
                total = total + torch.logsumexp(beta * torch.stack(others), 0)
    expected = total / 16
    gradient = torch.autograd.grad(expected, tuple(encoder.parameters()))
    assert numbers["exact_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = float(sum(g.square().sum() for g in gradient))
    assert numbers["gradient"] == pytest.approx(wanted, rel=1e-4)


def test_a_stationarity_run_that_diverged_is_a_failed_run() -> None:
    """Losses refuse NaN on a CPU only; nulls in its record broke the table of all runs."""
    job = stationarity.jobs(common.Options(quick=True, device="cpu"))[-1]
    assert job["method"] == common.FULL
    row = common.one("stationarity", {**job, "lr": 1e30}, time.time() + 60)
    assert row is not None and "the run diverged" in row["error"]


def test_first_images_are_in_the_data_sets_order(tmp_path: Path) -> None:
    numbers = {"cat": (3, 1), "ape": (2, 0)}
    for split in ("train", "test"):
        for name, found in numbers.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in found:
                Image.new("RGB", (8, 8), (10 * number,) * 3).save(folder / f"{number:06d}.png")
    images = stationarity.first_images(str(tmp_path), 3, 8)
    assert images[:, 0, 0, 0].tolist() == [0, 10, 20]


def test_first_images_of_a_built_in_set_are_its_labelled_ones(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    names = [f"stl10/train/{i}" for i in range(12)] + [f"stl10/unlabeled/{i}" for i in range(9)]
    pixels = torch.arange(21, dtype=torch.uint8).view(21, 1, 1, 1)
    data = SimpleNamespace(pretrain=ImageSet(tuple(names), None, pixels))
    monkeypatch.setattr(stationarity, "load_data", lambda *args, **options: data)
    assert stationarity.first_images("stl10", 14, 1).flatten().tolist() == list(range(14))


def test_a_built_in_set_is_fetched_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`reproduce` said "add --download to fetch it", an option that it refused."""
    fetched: list[str] = []

    def fetch(url: str, root: Any, **known: Any) -> None:
        """What the archive holds, of 48 labelled pictures, 2 others and 2 to test."""
        fetched.append(url)
        folder = Path(root) / "stl10_binary"
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(0)
        for split, count in (("train", 48), ("unlabeled", 2), ("test", 2)):
            pixels = torch.randint(0, 256, (count * 3 * 96 * 96,), generator=generator)
            (folder / f"{split}_X.bin").write_bytes(bytes(pixels.tolist()))
            (folder / f"{split}_y.bin").write_bytes(bytes([1] * count))
        (folder / "class_names.txt").write_text("bird")

    monkeypatch.setattr(stl10, "download_and_extract_archive", fetch)
    monkeypatch.setattr(stl10, "check_integrity", lambda path, md5: Path(path).exists())
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "stationarity", "--quick", "--methods", "dcl", "--device", "cpu"]

    def refusal(*more: str) -> str:
        assert run([*words, *more]) == 2 and not fetched
        return " ".join(capsys.readouterr().err.split())

    assert "add --download to fetch it" in refusal("--data", "stl10")
    assert "--download belongs to --data cifar10 or stl10" in (said := refusal("--download"))
    assert "no --data is given" in said and "digits" not in said  # not of this command
    assert "--download belongs to --data cifar10 or stl10" in refusal("--data", ".", "--download")
    assert not list(tmp_path.glob("runs/**/*.jsonl"))  # refused at once, not by every run
    assert run([*words, "--data", "stl10", "--download"]) == 0 and len(fetched) == 1
    assert run([*words, "--data", "stl10"]) == 0  # the record has that run
    (row,) = common.read_rows(tmp_path / "runs/quick/stationarity.jsonl")
    assert row["job"]["data"] == "stl10" and row["curve"][0]["step"] == 0


@pytest.mark.parametrize(
    "given", [["--data", "stl10", "--download"], ["--data", "stl10"], ["--download"]]
)
def test_what_an_experiment_does_not_read_is_not_fetched(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2.6 GB came for `theory`, and without --download it was refused for not being there."""
    monkeypatch.setattr("negchain.data.load_data", lambda *args, **more: pytest.fail("fetched"))
    assert run(["reproduce", "theory", "--quick", *given]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--data and --download belong to experiments on images, got theory" in said
    assert [name for name in reproduce.NAMES if not reproduce.load(name).on_data] == ["theory"]


@pytest.mark.parametrize("name", ["stl10", "burn-in", "finite-augmentations"])
def test_jobs_take_the_built_in_sets(name: str) -> None:
    with pytest.raises(ValueError, match="--data must name the images: .* stl10-unlabeled, which"):
        reproduce.load(name).jobs(common.Options())
    job = reproduce.load(name).jobs(common.Options(data="stl10-unlabeled"))[0]
    config = config_of(job)
    assert config.data == "stl10-unlabeled" and not config.download  # fetched before the runs


def test_collapse_is_no_convergence() -> None:
    job = {"encoder": "mlp", "beta": 5.0, "lr": 0.1, "method": "dcl"}
    end = {"exact_loss": math.log(998), "gradient": 1e-12, "variance": 1e-6, "weights": 1.0}
    table = stationarity.table([{"job": job, "curve": [end, end]}])
    assert "| DCL | 1 of 1 | – | – | – |" in table


def test_a_norm_on_the_way_through_collapse_is_not_the_least() -> None:
    """Runs fall into collapse and leave it again; the table said its norm, .0005, as the least."""
    job = {"encoder": "mlp", "beta": 5.0, "lr": 0.1, "method": "dcl"}
    way = [(3.0, 0.5), (5e-4, 1e-3), (2.0, 0.4), (7.0, 0.6)]
    curve = [{"step": n, "exact_loss": 6.0, "gradient": g, "variance": v, "weights": 1.0}
             for n, (g, v) in enumerate(way)]  # fmt: skip
    assert "| 0 of 1 | 6.00 | 7 | 2 |" in stationarity.table([{"job": job, "curve": curve}])
    fallen = {"job": job | {"seed": 1}, "curve": curve[:2]}
    both = [{"job": job, "curve": curve}, fallen]
    assert "| 1 of 2 | 6.00 | 7 | 2 |" in stationarity.table(both)
    loss, norm = stationarity.draw(both)["stationarity"].axes[:2]
    for axis, end in ((loss, 6.0), (norm, 7.0)):
        dotted, mean = axis.lines
        assert dotted.get_linestyle() == ":" and len(dotted.get_xdata()) == 2
        assert mean.get_ydata()[-1] == end and mean.get_label() == "DCL"
    (legend,) = loss.figure.legends
    assert [text.get_text() for text in legend.texts] == ["DCL", "a run that ends collapsed"]


def test_collapse_is_one_variance_in_all_tables() -> None:
    """It was 0.05 in one table, 0.01 in another, and 0.02 in the advice of a run's page."""
    assert COLLAPSED == 0.02
    for variance, said in ((0.015, 1), (0.03, 0)):
        point = {"embedding_variance": variance, "variance": variance, "weights": 1.0}
        point |= {"exact_loss": 6.0, "gradient": 1e-6}
        job = {"encoder": "mlp", "beta": 5.0, "lr": 0.1, "method": "dcl", "setting": "b32-none"}
        row = {"job": job, "config": {"epochs": 2}, "curve": [point, point]}
        assert f"| {said} of 1 |" in stationarity.table([row])
        assert accuracy.table("method", [row]).rstrip("| \n").endswith("1") == bool(said)


def test_lemma_1_holds_for_few_steps_and_not_for_many() -> None:
    """With B of m chains moving, none mixes faster than 1 - B/m, however many steps it makes."""
    found = {
        steps: theory.mixing({"beta": 0.5, "m": 3, "B": 1, "R": steps}) for steps in (1, 4, 24)
    }
    assert found[1]["holds"] and found[4]["holds"]
    assert found[24]["assumed"] and not found[24]["holds"]
    assert found[24]["rate"] == pytest.approx(2 / 3, abs=1e-3)


def test_longer_descent_has_smaller_gradients() -> None:
    case = {"beta": 5.0, "B": 0, "R": 0, "P": 0, "method": "full", "seed": 0}
    short, long = (theory.rate({**case, "T": length})["mean_square"] for length in (4, 64))
    assert long < 0.8 * short


def test_records_keep_what_finished_and_go_on(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    ran = []

    def work(job: dict, deadline: float) -> dict:
        ran.append(job["seed"])
        if job["seed"] == 1 and len(ran) < 3:
            raise RuntimeError("the disk is full")
        return {"value": job["seed"] / 3}

    def jobs(options: common.Options) -> list[dict]:
        return [{"seed": seed} for seed in range(options.seeds or 2)]

    toy = common.Experiment(lambda rows: "", lambda rows: {}, jobs, work)
    for module in (common, plan):
        monkeypatch.setattr(module, "load", lambda name: toy)

    def perform(seeds: int, minutes: float = 1) -> tuple[int, int]:
        options = common.Options(seeds=seeds, device="cpu")
        waiting = plan.missing(["theory"], options, tmp_path)
        return common.perform(waiting, options, tmp_path, minutes=minutes, processes=1)

    assert perform(2) == (1, 0) and ran == [0, 1]
    assert perform(3, minutes=0) == (0, 2) and ran == [0, 1]  # no time: nothing begins
    assert perform(3) == (0, 0) and ran == [0, 1, 1, 2]  # the failed one again, and the new one
    rows = common.read_rows(tmp_path / "theory.jsonl")
    assert [row["value"] for row in rows] == [0.0, 0.333333, 0.666667]
    stopped = {"job": {"seed": 2}, "complete": False, "value": 9}  # a slice joined afterwards
    common.append(tmp_path / "theory.jsonl", stopped)
    assert {row["value"] for row in common.read_rows(tmp_path / "theory.jsonl")} == {
        *(row["value"] for row in rows)
    }
    header = json.loads((tmp_path / "theory.jsonl").read_text().splitlines()[0])
    assert {"commit", "hardware", "command", "versions"} <= set(header)


@pytest.mark.parametrize("words", ["benchmarks/pictures.py --seeds 1", "negchain reproduce cost"])
def test_records_name_the_command_that_made_them(words: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first, *rest = words.split()
    place = first if first != "negchain" else "/venv/bin/negchain"
    monkeypatch.setattr("sys.argv", [place, *rest])
    assert common.provenance(common.Options(device="cpu"))["command"] == words
    if first != "negchain":  # called from its own folder
        monkeypatch.chdir(ROOT / "benchmarks")
        monkeypatch.setattr("sys.argv", ["pictures.py", *rest])
        assert common.provenance(common.Options(device="cpu"))["command"] == words


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_dies_takes_no_other_run_along(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Run 1 dies once, 2 fails once, 3 dies always; 0 and 4 are beside them."""

    def one(name: str, job: dict, deadline: float) -> dict:
        mark, seed = tmp_path / str(job["seed"]), job["seed"]
        again = mark.exists()
        mark.touch()
        if seed == 3 or (seed == 1 and not again):
            os._exit(7)
        failed = {"error": "CUDA error"} if seed == 2 and not again else {}
        return {"job": job, "process": os.getpid(), **failed}

    monkeypatch.setattr(common, "one", one)
    monkeypatch.setattr(common, "CONTEXT", multiprocessing.get_context("fork"))  # fast
    said: list[str] = []
    waiting = [("stl10", {"seed": seed}) for seed in range(5)]
    found = common._side_by_side(
        waiting, time.time() + 6e7, 2, said.append, lambda shares: None
    )  # the default time
    rows = {row["job"]["seed"]: row for _, row in found}
    assert sorted(rows) == [0, 1, 2, 3, 4] and len(said) == 3
    assert rows[3]["error"] == "its process died (exit code 7)"
    assert all("error" not in rows[seed] for seed in (0, 1, 2, 4))


def test_a_run_hands_over_what_it_has_when_time_is_up(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    settings = {"data": "digits", "batch_size": 4, "subset": 300, "epochs": 1, "device": "cpu"}
    job = {"method": "dcl", "seed": 0, "settings": settings}
    found = train(job, time.time())
    assert not found["complete"] and found["curve"][-1]["step"] == 1
    assert "emc2-variant" not in METHODS


def test_quick_stationarity_from_the_command_line(tmp_path: Path) -> None:
    """Full-gradient descent lowers the exact loss; its record is redrawn."""
    words = ["reproduce", "stationarity", "--quick", "--methods", "full gradient,emc2"]
    assert run([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = common.read_rows(tmp_path / "stationarity.jsonl")
    assert len(rows) == 2
    for row in pages.where(rows, method="full gradient"):
        assert row["curve"][-1]["exact_loss"] < row["curve"][0]["exact_loss"] - 0.5
    figure = tmp_path / "stationarity.svg"
    before = figure.read_bytes()
    figure.unlink()
    assert run(["reproduce", "stationarity", "--redraw", "--out", str(tmp_path)]) == 0
    assert figure.read_bytes() == before


def test_quick_runs_do_not_enter_the_records(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", "theory", "--quick", "--minutes", "0"]) == 0
    assert not (tmp_path / "records").exists()
    assert (tmp_path / "runs" / "quick" / "theory.jsonl").exists()


@pytest.mark.parametrize(
    "name", ["stl10", "burn-in", "finite-augmentations", "imagenet100", "cost"]
)
def test_quick_runs_have_norm_and_proposals_of_their_setting(name: str) -> None:
    """The presets' "none" and "batch" are not what digits have without one: BatchNorm, both views.

    So the row "ours" of a quick burn-in was one of the paper's.
    """
    asked = [common.Options(quick=not data, device="cpu", data=data) for data in (None, "digits")]
    quick, full = (reproduce.load(name).jobs(options) for options in asked)
    for job in (job for job in quick if "setting" in job):
        keys = ("seed", "setting", "method", "augmentations")
        like = next(
            j for j in full
            if [j.get(k) for k in keys] == [job.get(k) for k in keys]
            and ("chain" in j) == ("chain" in job)
        )  # fmt: skip
        found, expected = config_of(job), config_of(like)
        assert found.norm == expected.norm == job["setting"].split("-")[1]
        assert found.proposal == expected.proposal


def test_time_runs_what_it_reads(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """It has no record of its own, and once ended in silence where there were none to read."""
    ran: list[str] = []

    def perform(waiting: list, *rest: Any, **more: Any) -> tuple[int, int]:
        ran.extend(dict.fromkeys(name for name, _ in waiting))
        return 0, 0

    monkeypatch.setattr(common, "perform", perform)
    assert run(["reproduce", "time", "cost", "--quick", "--out", str(tmp_path)]) == 0
    assert ran == ["cost", "stl10"]  # what measures time is first


@pytest.mark.parametrize("line", [b'{"job": {"se', b"[1]", b'{"job": "\xff"}'])
def test_a_damaged_line_of_a_record_is_named(line: bytes, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """A full disk leaves half a line."""
    path = tmp_path / "theory.jsonl"
    path.write_bytes(b'{"record": "theory"}\n' + line)
    assert run(["reproduce", "theory", "--redraw", "--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"line 2 of {path}" in said and "delete the line" in said


def test_jobs_below_nothing_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """They were waited for, busily and for ever."""
    monkeypatch.setattr(common, "perform", lambda *args, **more: 0)
    assert run(["reproduce", "theory", "--jobs", "-1", "--out", str(tmp_path)]) == 2
    assert "--jobs must be at least 0, got -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lines", [None, "", '{"record": "theory"}\n', '{"job": {}, "error": "x"}\n']
)
def test_a_record_without_runs_is_told_from_none(lines: str | None, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """An empty record was said not to be there."""
    path = tmp_path / "theory.jsonl"
    if lines is not None:
        path.write_text(lines)
    assert run(["reproduce", "theory", "--redraw", "--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    none = f"there is no record {path};"
    assert (none if lines is None else f"there are no runs in {path}, or only failed ones;") in said
    assert f"run `negchain reproduce theory --out {tmp_path}` first" in said


@pytest.mark.parametrize("minutes", ["nan", "-1", "-inf", "0", "inf"])
def test_minutes_that_are_no_time_are_refused(minutes: str, tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """With nan several processes ran nothing, in silence, and one ran everything."""
    given: list[float] = []

    def perform(*args: Any, minutes: float, **more: Any) -> tuple[int, int]:
        given.append(minutes)
        return 0, 0

    monkeypatch.setattr(common, "perform", perform)
    status = run(["reproduce", "theory", "--minutes", minutes, "--out", str(tmp_path)])
    if minutes in ("0", "inf"):
        assert status == 0 and given == [float(minutes)]
    else:
        said = " ".join(capsys.readouterr().err.split())
        assert status == 2 and f"--minutes must be at least 0, got {minutes}; leave it out" in said


def test_several_processes_of_torchrun_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would have run everything, into one record."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["reproduce", "theory", "--quick", "--out", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "reproduce must be one process, and torchrun started 2; start it without" in said
    assert not (tmp_path / "out").exists()


def test_unknown_experiments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "stl11"]) == 2
    assert "did you mean 'stl10'?" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records" / "reproduce"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
WHY = (ROOT / "docs" / "better_estimate.md").read_text(encoding="utf-8")


def reproduce_rows(name: str) -> list[dict[str, Any]]:
    read = (*common.runs_of(name), *reproduce.load(name).also)
    return [{**r, "record": of} for of in read for r in pages.read_rows(RECORDS / f"{of}.jsonl")]


@pytest.mark.parametrize("name", reproduce.NAMES)
def test_the_page_shows_what_the_record_says(name: str) -> None:
    """`reproduce NAME --redraw` was run after the record changed."""
    (shown,) = re.findall(rf"<!-- table {name} -->\n(.*?)<!-- end -->", PAGE, re.S)
    rows = reproduce_rows(name)
    assert shown.strip() == (reproduce.load(name).table(rows) if rows else "")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "cost" else pytest.mark.slow) for n in reproduce.NAMES],
)
def test_the_committed_figures_are_those_of_the_records(name: str, tmp_path: Path) -> None:
    """To a hundredth of a point, and the table goes where the page has a place for it."""
    if not reproduce_rows(name):
        pytest.skip("no record yet")
    page = tmp_path / "results.md"
    page.write_text(f"<!-- table {name} -->\nbefore\n<!-- end -->\n")
    pages.redraw(name, pages.rows_of(name, RECORDS), tmp_path, page)
    assert "before" not in page.read_text()
    drawn = list(tmp_path.glob("*.svg"))
    assert drawn or name == "time"  # one method has been timed alone: nothing to compare
    for file in drawn:
        shown = (ROOT / "docs" / "figures" / file.name).read_text(encoding="utf-8")
        (words, numbers), (same, close) = map(_taken_apart, (file.read_text("utf-8"), shown))
        assert words == same
        assert numbers == pytest.approx(close, abs=0.01)


def _taken_apart(svg: str) -> tuple[list[str], list[float]]:
    """Words and coordinates: machines round the last digit apart."""
    pattern = r"-?\d+\.\d+"
    return re.split(pattern, svg), [float(number) for number in re.findall(pattern, svg)]


def lines_of(record: str) -> list[dict[str, Any]]:
    lines = (ROOT / "records" / record).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "job" in row]


def cells_under(head: str) -> list[list[str]]:
    page = PAGE if head in PAGE else WHY
    table = page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_tables_written_by_hand_are_those_of_their_records() -> None:
    keys = ("cosine", "dcl", "view", "age", "all")
    rows = lines_of("2026-11-16_error-in-training_cpu.jsonl")
    epochs = {row["epoch"]: [r for r in rows if r["epoch"] == row["epoch"]] for row in rows}
    assert {len(own) for own in epochs.values()} == {3}
    known = {
        str(epoch): [f"{statistics.fmean(row[key] for row in own):.2f}" for key in keys]
        for epoch, own in epochs.items()
    }
    shown = cells_under("| epoch | cosine of two views")
    assert len(shown) == 7 and all(known[epoch] == cells for epoch, *cells in shown)

    for record, head, number in (
        ("2026-11-16_hypotheses_cpu.jsonl", "| case | seeds |", 38),
        ("2026-11-16_pictures_cpu.jsonl", "| CIFAR-10 | seeds |", 30),
    ):
        cases: dict[str, list[Any]] = {}
        for row in lines_of(record):
            cases.setdefault(row["job"]["case"], []).append(row["curve"][-1])
        keys = ("global_loss", "probe", "probe_10pct", "knn20")
        said = {
            (str(len(ends)), *(pages.spread([end[key] for end in ends]) for key in keys))
            for ends in cases.values()
        }
        shown = cells_under(head)
        assert len(shown) == len(said) == number
        for _, seeds, *cells in shown:
            assert (seeds, *(re.sub(r"(^| )\.", r"\g<1>0.", cell) for cell in cells)) in said

    rows = sorted(lines_of("reproduce/differing-views.jsonl"), key=lambda r: -r["cosine"])
    for head, bounds in (("| | encodes beyond the batch", False), ("| bound | encodes", True)):
        own = [row for row in rows if "shares" not in row["job"]]
        by_cosine = [row for row in own if row["job"].get("bounds", False) == bounds]
        measured = [[row["errors"][name] for row in by_cosine] for name in by_cosine[0]["errors"]]
        shown = cells_under(head)
        assert len(shown) == len(measured) and len(by_cosine) == 4
        for (_, _, *cells), errors in zip(shown, measured, strict=True):
            for cell, error in zip(cells, errors, strict=True):
                numbers = [float(text) for text in re.findall(r"[\d.]+", cell)]
                wanted = [error["by_item"], error["by_view"], error["rms"]]
                assert numbers[:2] == pytest.approx(wanted[:2], abs=0.0051), cell
                assert numbers[2] == pytest.approx(wanted[2], abs=0.051), cell


def test_what_is_said_of_pairs_on_cifar_is_in_the_record() -> None:
    ends = {
        (row["job"]["case"], row["job"]["seed"]): row["curve"][-1]
        for row in lines_of("2026-11-16_pictures_cpu.jsonl")
    }

    def gaps(case: str, other: str, key: str) -> list[float]:
        """`case` minus `other` of every seed that both have."""
        seeds = sorted(s for c, s in ends if c == case and (other, s) in ends)
        return [ends[case, seed][key] - ends[other, seed][key] for seed in seeds]

    probes = []
    for more, mean, error in (("", 0.115, 0.017), (", b 32", 0.032, 0.006)):
        lower = gaps(f"isir, both{more}", f"dcl{more}", "global_loss")
        assert len(lower) == 10 and max(lower) < 0
        assert -statistics.mean(lower) == pytest.approx(mean, abs=6e-4)
        assert statistics.stdev(lower) / math.sqrt(10) == pytest.approx(error, abs=6e-4)
        probes.append(gaps(f"isir, both{more}", f"dcl{more}", "probe"))
        for chain, gain in (("isir", (0.31, 0.01)), ("emc2", (0.29, 0.01))):
            kept_in = gaps(f"{chain}, both, all{more}", f"{chain}, both{more}", "global_loss")
            assert -statistics.mean(kept_in) == pytest.approx(gain[bool(more)], abs=6e-3)
    assert statistics.mean(map(statistics.mean, probes)) == pytest.approx(0.006, abs=5e-4)
    errors = [statistics.stdev(own) / math.sqrt(10) for own in probes]
    assert math.hypot(*errors) / 2 == pytest.approx(0.003, abs=5e-4)
    assert sum(gap >= 0 for own in probes for gap in own) == 14
    larger = ", b 32, 5,000 pictures, 32 px"
    lower = gaps(f"isir, both{larger}", f"dcl{larger}", "global_loss")
    assert len(lower) == 5 and sum(gap < 0 for gap in lower) == 4
    assert -statistics.mean(lower) == pytest.approx(0.042, abs=6e-4)
    assert statistics.stdev(lower) / math.sqrt(5) == pytest.approx(0.026, abs=6e-4)


def test_the_paired_table_of_stationarity_is_that_of_its_record() -> None:
    ends = {}
    for row in lines_of("reproduce/stationarity.jsonl"):
        job = row["job"]
        if job["encoder"] != "mlp":
            continue
        ends[job["beta"], job["lr"], job["method"], job["seed"]] = row["curve"][-1]["exact_loss"]
    shown = cells_under("| exact L minus EMC²'s |")
    assert len(shown) == 3
    for case, *cells in shown:
        beta, lr = (float(number) for number in re.findall(r"\d+\.?\d*", case)[:2])
        others = ("infonce", "dcl", "sogclr", "isir", "informed", "negcache")
        for other, cell in zip(others, cells, strict=True):
            gaps = [ends[beta, lr, other, s] - ends[beta, lr, "emc2", s] for s in range(5)]
            mean, error = (float(part) for part in cell.replace("−", "-").split(" ± "))
            assert mean == pytest.approx(statistics.mean(gaps), abs=6e-4)
            assert error == pytest.approx(statistics.stdev(gaps) / math.sqrt(5), abs=6e-4)


def ends_of_resnet(rows: list[common.Row]) -> dict[tuple[str, int], common.Row]:
    """Of ResNet-18 at β = 14.28, by method and seed: the last measurement."""
    return {(r["job"]["method"], r["job"]["seed"]): r["curve"][-1]
            for r in pages.where(rows, encoder="resnet18", beta=14.28)}  # fmt: skip


def test_the_table_of_resnet_at_a_large_step_is_that_of_its_record() -> None:
    ends = ends_of_resnet(reproduce_rows("stationarity"))
    floors = [ends.pop((common.FULL, seed)) for seed in range(2)]
    text = " ".join(PAGE.split())
    assert "it ends at −7.03, with a norm of 0.44 (on the way it is up to 900)" in text
    assert statistics.mean(f["exact_loss"] for f in floors) == pytest.approx(-7.03, abs=0.006)
    norm = statistics.geometric_mean(f["gradient"] for f in floors)
    assert round(norm, 2) == 0.44
    assert "EMC²'s norm is 13 times as large, at a loss 13.5 higher" in text
    ours = [ends["emc2", seed] for seed in range(5)]
    assert round(statistics.geometric_mean(e["gradient"] for e in ours) / norm) == 13
    assert statistics.mean(e["exact_loss"] for e in ours) + 7.03 == pytest.approx(13.5, abs=0.06)
    rows = pages.where(reproduce_rows("stationarity"), encoder="resnet18", beta=14.28)
    began = {(r["job"]["method"], r["job"]["seed"]): r["curve"][0]["exact_loss"] for r in rows}
    higher = {m: sum(ends[m, s]["exact_loss"] > began[m, s] for s in range(5))
              for m in ("dcl", "isir")}  # fmt: skip
    assert "two seeds of DCL (7.4 and 7.9) and one of i-SIR (8.33) make most of it" in text
    assert higher == {"dcl": 2, "isir": 1}
    dcl = sorted(ends["dcl", s]["exact_loss"] for s in range(5))
    assert [round(loss, 1) for loss in dcl[-2:]] == [7.4, 7.9]
    assert round(max(ends["isir", s]["exact_loss"] for s in range(5)), 2) == 8.33
    assert len(ends) == 35
    norms, losses = cells_under("| over EMC²'s | InfoNCE")
    for other, norm, loss in zip(
        ("infonce", "dcl", "sogclr", "isir", "informed"), norms[1:6], losses[1:6], strict=True
    ):
        pairs = [(ends[other, seed], ends["emc2", seed]) for seed in range(5)]
        ratios = [a["gradient"] / b["gradient"] for a, b in pairs]
        told = [float(number) for number in re.findall(r"[\d.]+", norm)]
        found = [statistics.geometric_mean(ratios), min(ratios), max(ratios)]
        assert told == [float(f"{value:.2g}") for value in found]
        logs = [math.log(ratio) for ratio in ratios]
        beyond = statistics.mean(logs) > 2 * statistics.stdev(logs) / math.sqrt(5)
        assert beyond == (other == "infonce")
        gaps = [a["exact_loss"] - b["exact_loss"] for a, b in pairs]
        mean, error = (float(part) for part in loss.replace("−", "-").split(" ± "))
        assert mean == pytest.approx(statistics.mean(gaps), abs=6e-3)
        assert error == pytest.approx(statistics.stdev(gaps) / math.sqrt(5), abs=6e-3)
    kept = [seed for seed in range(5) if not stationarity.collapsed(ends["negcache", seed])]
    ratios = [ends["negcache", s]["gradient"] / ends["emc2", s]["gradient"] for s in kept]
    assert norms[6] == f"{len(kept)} of 5 left: {min(ratios):.2f} and {max(ratios):.1f}"


def test_two_orders_of_magnitude_are_collapses_only() -> None:
    """The verdict on the paper's claim, over all settings and pairs of a seed with EMC²."""
    page = " ".join(PAGE.split())
    assert "in any of the five settings (65 times at most, between two seeds of DCL;" in page
    assert "No method's norm is more than 18 times EMC²'s of the same seed" in page
    rows = [row for row in reproduce_rows("stationarity") if row.get("complete", True)]
    found = {tuple(r["job"][key] for key in ("encoder", "beta", "lr", "method", "seed")):
             r["curve"][-1] for r in rows}  # fmt: skip
    ratios, fallen = [], []
    for (*case, method, seed), end in found.items():
        if method in ("emc2", common.FULL):
            continue
        ratio = end["gradient"] / found[(*case, "emc2", seed)]["gradient"]
        if stationarity.collapsed(end):
            assert (method, *case) == ("negcache", "resnet18", 14.28, 0.01)
            fallen.append(1 / ratio)
        else:
            ratios.append(ratio)
    assert max(ratios) == pytest.approx(18, abs=0.5) and min(ratios) > 0.1
    norms: dict[Any, list[tuple[float, str]]] = {}
    for (*setting, method, _), end in found.items():
        if method != common.FULL and not stationarity.collapsed(end):
            norms.setdefault(tuple(setting), []).append((end["gradient"], method))
    apart = [(max(own)[0] / min(own)[0], max(own)[1], min(own)[1]) for own in norms.values()]
    assert len(apart) == 5 and max(apart) == (pytest.approx(65, abs=0.5), "dcl", "dcl")
    assert [round(value, -1) for value in (min(fallen), max(fallen))] == pytest.approx(
        [280, 31000], rel=0.02
    )
    rows = pages.where(rows, encoder="resnet18", beta=14.28)
    rows = [row for row in rows if row["job"]["method"] != common.FULL]
    ways = {row["job"]["method"]: 0 for row in rows}
    for row in rows:
        ways[row["job"]["method"]] += any(map(stationarity.collapsed, row["curve"][1:-1]))
    told = {"infonce": 2, "isir": 3, "dcl": 4, "sogclr": 4, "emc2": 4, "negcache": 5, "informed": 4}
    assert ways == told and sum(ways.values()) == 26
    assert "26 of the 35 runs were collapsed when measured on the way (InfoNCE 2," in page
    ends = ends_of_resnet(rows)
    higher = {m: sum(ends[m, s]["exact_loss"] > ends["emc2", s]["exact_loss"] for s in range(5))
              for m in ("infonce", "sogclr", "dcl", "isir")}  # fmt: skip
    assert higher == {"infonce": 0, "sogclr": 0, "dcl": 5, "isir": 4}


def test_the_pairs_of_imagenet100_are_those_of_its_record() -> None:
    rows = reproduce_rows("imagenet100")
    ends = {(r["job"]["method"], r["job"]["seed"]): r["curve"][-1] for r in rows}
    assert len(ends) == 8
    shown = cells_under("| EMC² minus | probe | 1-NN")
    keys = ("probe", "knn1", "probe_paper", "global_loss")
    for other, (_, *cells) in zip(("infonce", "sogclr", "dcl"), shown, strict=True):
        for key, cell in zip(keys, cells, strict=True):
            gaps = [ends["emc2", seed][key] - ends[other, seed][key] for seed in (0, 1)]
            told = [float(number) for number in cell.replace("−", "-").split(", ")]
            assert told == pytest.approx(gaps, abs=0.0051 if key == "global_loss" else 6e-4)
    probes = [end["probe"] for end in ends.values()]
    assert (round(min(probes), 3), round(max(probes), 3)) == (0.12, 0.15)
    advice = " ".join((ROOT / "docs" / "which_method.md").read_text(encoding="utf-8").split())
    means = {m: statistics.mean(ends[m, seed]["probe"] for seed in (0, 1)) for m, _ in ends}
    told = (
        f"{title} {means[name]:.3f}".replace("0.", ".")
        for name, title in (("emc2", "EMC²"), ("infonce", "InfoNCE"), ("sogclr", "SogCLR"))
    )
    dcl = f"{means['dcl']:.3f}".lstrip("0")
    assert f"the highest of four too: {dcl}; {', '.join(told)}" in advice


@pytest.mark.parametrize("name", ["stl10", "burn-in", "finite-augmentations"])
def test_quick_keeps_what_the_user_gave(name: str) -> None:
    """--data, --epochs and --settings were dropped without a word, and digits were trained on."""
    two = ("b256-none", "b256-batch") if name != "burn-in" else ("b32-none", "b32-batch")
    given = common.Options(quick=True, data="photos", epochs=1, settings=two)
    jobs = reproduce.load(name).jobs(given)
    assert {job["setting"] for job in jobs} == set(two)
    assert {(j["settings"]["data"], j["settings"]["epochs"]) for j in jobs} == {("photos", 1)}
