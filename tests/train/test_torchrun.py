"""`negchain train` by several processes: the numbers of one, and what happens when one is gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torchrun_ranks import TINY, at_step, ended, metrics, said, start, unjudged

from negchain.cli import run
from negchain.tasks.image_judge import ImageJudge
from negchain.tasks.images import ImageTask
from negchain.train import checkpoint, parallel, trainer
from negchain.train.config import TrainConfig
from negchain.train.pretrained import load_trained
from negchain.train.step import TrainStep

CLOCK = ("seconds", "samples_per_second")


def require_equal(one: Path, other: Path, tolerance: float = 1e-10) -> None:
    """The same lines of metrics, every number."""
    a, b = metrics(one), metrics(other)
    assert list(a) == list(b)
    for step, line in a.items():
        for name, value in line.items():
            if name not in CLOCK:
                assert b[step][name] == pytest.approx(value, abs=tolerance), (step, name)


def quick(rank: int) -> None:
    unjudged()


def every_block(rank: int) -> None:
    """With --shard-encoder: cut small blocks too."""
    parallel.BLOCK = 1


def in_parts(rank: int) -> None:
    """Likewise, and see that a rank has its share alone."""
    unjudged()
    every_block(rank)
    made = TrainStep.__init__

    def checked(self: TrainStep, task: Any, encoder: Any, *more: Any) -> None:
        made(self, task, encoder, *more)
        if task.config.shard_encoder and self.ranks is not None:
            own = sum(p.to_local().numel() for p in encoder.parameters())
            whole = sum(p.numel() for p in encoder.parameters())
            assert own < whole * 1.05 / self.ranks.world
            assert len([m for m in encoder.modules() if isinstance(m, FSDPModule)]) > 3

    TrainStep.__init__ = checked  # type: ignore[method-assign]


WORDS = f"{TINY} --norm none --precision float64 --batch-size 10 --steps 12 --out"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert ended(1, f"{WORDS} {folder / 'one'}", folder / "log", quick) == [0]
    return folder / "one"


@pytest.mark.parametrize(("shard", "worlds"), [("", (1, 4)), (" --shard-encoder", (1, 3))])
def test_a_run_of_two_is_that_of_one_and_goes_on_with_any_number(
    tmp_path: Path, one: Path, shard: str, worlds: tuple[int, ...]
) -> None:
    def asked_to_stop(rank: int) -> None:
        in_parts(rank)
        if rank == 1:  # one rank hears of it, all stop at one step
            at_step(5, lambda run: setattr(run, "stop", True))

    log = tmp_path / "two-log"
    states = ended(2, f"{WORDS} {tmp_path / 'two'}{shard}", log, asked_to_stop)
    assert states in ([130, 1], [1, 130]), said(log)
    assert said(log).count("stopped after step 6 of 12") == 1
    assert max(metrics(tmp_path / "two")) == 6
    for world in worlds:  # four ranks have 2, 3, 2, 3 rows
        out = tmp_path / f"on-{world}"
        shutil.copytree(tmp_path / "two", out)
        resumed = f"train --quiet --resume --logger none --out {out}"
        assert ended(world, resumed, tmp_path / f"log-{world}", in_parts) == [0] * world, said(
            tmp_path / f"log-{world}"
        )
        require_equal(one, out)
        assert said(tmp_path / f"log-{world}").count("run folder") == 1  # rank 0 alone speaks
        weights, expected = (load_trained(folder)[0].state_dict() for folder in (out, one))
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_one_process(tmp_path: Path, world: int) -> None:
    """Not only the steps Adam makes of them, which forgive a factor; of a learned beta as well."""

    def learned(rank: int) -> None:
        unjudged()
        build = ImageTask.build

        def with_beta(self: ImageTask) -> Any:
            encoder, notes = build(self)
            encoder.beta = torch.nn.Parameter(torch.tensor(5.0))
            return encoder, notes

        ImageTask.build = with_beta  # type: ignore[method-assign]
        ImageTask.beta = lambda self, encoder: encoder.beta  # type: ignore[method-assign]
        at_step(1, lambda run: torch.save(grads(run), f"{log}.grads.{rank}"))

    def grads(run: trainer.Run) -> dict[str, Any]:
        return {name: p.grad for name, p in run.encoder.named_parameters()}

    for ranks in (1, world):  # three have 3, 3 and 4 rows of 10
        log = tmp_path / str(ranks)
        words = f"{WORDS} {tmp_path / 'run'}{ranks} --steps 2"
        assert ended(ranks, words, log, learned) == [0] * ranks, said(log)
    alone = torch.load(tmp_path / "1.grads.0")
    assert alone["beta"] != 0
    for rank in range(world):
        found = torch.load(tmp_path / f"{world}.grads.{rank}")
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


def test_nan_on_one_rank_ends_all_with_one_message(tmp_path: Path) -> None:
    def spoiled(rank: int) -> None:
        unjudged()
        inputs = ImageTask.inputs

        def nan(self: ImageTask, *given: object) -> torch.Tensor:
            return inputs(self, *given) * float("nan")  # type: ignore[arg-type]

        if rank == 1:
            at_step(4, lambda run: setattr(ImageTask, "inputs", nan))

    out, log = tmp_path / "run", tmp_path / "log"
    assert ended(2, f"{TINY} --checkpoint-every 3 --out {out}", log, spoiled) == [1, 1]
    assert said(log).count("failed: embeddings must be finite") == 1, said(log)
    loaded = checkpoint.load_latest(out / "checkpoints")
    assert loaded is not None and loaded.step == 3


@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_gone_ends_the_run_with_a_message(tmp_path: Path, fault: int) -> None:
    def gone(rank: int) -> None:
        unjudged()
        if rank == 1:
            at_step(4, lambda run: os.kill(os.getpid(), fault))

    out, log = tmp_path / "run", tmp_path / "log"
    patience = 20 if fault == signal.SIGSTOP else 200  # a closed connection is noticed at once
    words = f"{TINY} --checkpoint-every 3 --rank-timeout {patience} --out {out}"
    first, second = start(2, words, log, gone)
    try:
        first.join(240)
        assert first.exitcode == 1, said(log)
        assert said(log).count("failed: rank 0 of 2 lost another one") == 1
        assert "--resume" in said(log) and "Traceback" not in said(log)
        loaded = checkpoint.load_latest(out / "checkpoints")
        assert loaded is not None and loaded.step == 3
    finally:
        second.kill()


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    states = ended(3, f"{TINY} --batch-size 2 --out {out}", log, quick)
    assert 2 in states and 0 not in states
    assert said(log).count("refused: --batch-size 2 is shared by 3 processes") == 1
    assert not out.exists()


def other_pictures(rank: int) -> None:
    """Each rank reads as many pictures, and other ones."""
    unjudged()
    made = ImageTask.__init__

    def other(self: ImageTask, *given: Any) -> None:
        made(self, *given)
        self.fingerprint += str(rank)

    ImageTask.__init__ = other  # type: ignore[method-assign]


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    """A machine's copy may be old: positions are then other pictures, and no number shows it."""
    out, log = tmp_path / "run", tmp_path / "log"
    assert 0 not in ended(2, f"{TINY} --out {out}", log, other_pictures)
    assert said(log).count("all ranks must read one data set") == 1
    assert not out.exists()


def test_a_restarted_run_goes_on_only_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert run(TINY.split()) == 2  # nobody would find its folder again
    assert "--max-restarts needs --out" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    words = [*TINY.split(), "--out", str(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(asdict(TrainConfig(seed=7))))
    assert run(words) == 2  # somebody else's run
    assert "already holds a run" in capsys.readouterr().err


MORE = {
    "batchnorm": "--norm batch",
    "sogclr": "--norm none --method sogclr",
    "negcache": "--norm none --method negcache",
    "informed": "--norm none --proposal informed",
    "stored": "--norm none --augmentations 3",
    "on disk": "--norm none --resident-gb 0 --workers 0",
    "parts": "--norm batch --proposal informed --shard-encoder",
    "parts-lars": "--norm group --optimizer lars --shard-encoder",
    "parts-sgd": "--norm none --optimizer sgd --method negcache --shard-encoder",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", MORE.values(), ids=list(MORE))
def test_every_kind_of_step_is_that_of_one_process(tmp_path: Path, words: str) -> None:
    for world in (1, 2, 4):
        out, log = tmp_path / str(world), tmp_path / f"log{world}"
        given = f"{TINY} --precision float64 --batch-size 12 {words} --out {out}"
        assert ended(world, given, log, in_parts) == [0] * world, said(log)
        if world > 1:
            require_equal(tmp_path / "1", out, 2e-6 if "sogclr" in words else 1e-9)


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    def thorough(self: ImageJudge, encoder: object) -> object:
        time.sleep(30)
        return {"knn1": 0.5}, {}

    def long(rank: int) -> None:
        unjudged()
        ImageJudge.thorough = thorough  # type: ignore[method-assign,assignment]

    words = f"{TINY} --rank-timeout 15 --out {tmp_path / 'run'}"
    assert ended(2, words, tmp_path / "log", long) == [0, 0], said(tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["", " --shard-encoder"])
def test_texts_and_captions_too(tmp_path: Path, shard: str) -> None:
    """In float32 here: what both tasks share with images is above."""
    pytest.importorskip("sentence_transformers")
    from tasks.pairs_data import captioned, tiny_bert
    from tasks.tiny_texts import write_beir, write_model

    write_model(tmp_path / "model")
    write_beir(tmp_path / "beir")
    for config in (tmp_path / "model").rglob("config.json"):
        text = re.sub(r'(dropout_prob": )0\.1', r"\g<1>0.0", config.read_text())
        config.write_text(text)
    captioned(tmp_path / "pairs")
    tiny_bert(tmp_path / "bert")
    common = "--steps 6 --log-every 1 --device cpu --logger none --quiet --warmup-epochs 0"
    for words in (
        f"--data {tmp_path / 'beir'} --encoder {tmp_path / 'model'} --batch-size 6",
        f"--data {tmp_path / 'pairs'} --text-encoder {tmp_path / 'bert'} --batch-size 6 "
        "--encoder small-cnn --image-size 8 --embedding-dim 8 --workers 0 --probe-samples 16",
    ):
        for world in (1, 2):
            out, log = tmp_path / str(world), tmp_path / f"log{world}"
            shutil.rmtree(out, ignore_errors=True)
            given = f"train {words} {common} --out {out}{shard}"
            assert ended(world, given, log, every_block) == [0] * world, said(log)
        require_equal(tmp_path / "1", tmp_path / "2", 2e-4)


HERE = Path(__file__).parent


@pytest.mark.slow
def test_torchrun_itself_restarts_a_killed_run_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(f"""
import os, signal, sys
sys.path[:0] = {[str(folder) for folder in (Path(trainer.__file__).parents[2], HERE, HERE.parent)]}
from torchrun_ranks import at_step, unjudged
from negchain.cli import main
unjudged()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    at_step(5, lambda run: os.kill(os.getpid(), signal.SIGKILL))
main()
""")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = f"{TINY} --norm none --precision float64 --checkpoint-every 2 --out"
    done = subprocess.run(
        [*launch, "--max-restarts", "1", script, *words.split(), tmp_path / "run"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "continuing after step 4 of 10" in done.stderr
    assert ended(1, f"{words} {tmp_path / 'one'}", tmp_path / "log", quick) == [0]
    require_equal(tmp_path / "one", tmp_path / "run")
