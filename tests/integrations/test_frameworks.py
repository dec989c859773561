"""Tools that need no code of ours: their examples, run and resumed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from framework_play import FOLDER, assert_same, load, snapshot

NUM = 48


@pytest.mark.parametrize("path", sorted(FOLDER.glob("with_*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_say_what_differs(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert 4 <= sum("# (*)" in line for line in lines) <= 12


def test_the_page_shows_lines_of_the_examples() -> None:
    page = (FOLDER.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"^```py\n(.*?)^```", page, re.S | re.M)).splitlines()
    code = [line for path in FOLDER.glob("with_*.py") for line in path.read_text().splitlines()]
    real = {line.split("  # (*)")[0].strip() for line in code}
    assert len(shown) > 10 and [line for line in shown if line not in real] == []


@pytest.fixture(scope="module")
def items() -> torch.Tensor:
    return torch.randn(NUM, 12, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- Lightning

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def lightning():
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load("with_lightning")


@pytest.fixture
def lenient():
    """Lightning's own advice: workers, intervals of logging, weights_only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_lightning_resumes_and_validation_touches_nothing(
    lightning, items, tmp_path, lenient
) -> None:
    class Watched(lightning.Contrastive):
        def on_validation_epoch_start(self) -> None:
            self.before = snapshot(self.loss_fn)

        def on_validation_epoch_end(self) -> None:
            assert_same(self.before, snapshot(self.loss_fn))
            self.validated = True

    path = str(tmp_path / "last.ckpt")
    first = lightning.fit(Watched(items), path, max_epochs=1, **QUIET)
    assert int(first.loss_fn.step) == 3 and first.validated
    again = Watched(items)
    lightning.fit(again, str(tmp_path / "same.ckpt"), path, max_epochs=1, **QUIET)
    assert_same(snapshot(first.loss_fn), snapshot(again.loss_fn))
    further = lightning.fit(Watched(items), path, path, max_epochs=2, **QUIET)
    assert int(further.loss_fn.step) == 6


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_what_lightnings_chains_hold_is_of_the_batchs_type(
    lightning, items, tmp_path, lenient, precision
) -> None:
    module = lightning.Contrastive(items)
    lightning.fit(module, str(tmp_path / "a"), max_epochs=2, precision=precision, **QUIET)
    assert int(module.loss_fn.step) == 6


def test_lightning_fine_tunes_on_another_data_set(lightning, items, tmp_path, lenient) -> None:
    """Issue 13.9: the checkpoint of another size, for its weights alone."""
    path = str(tmp_path / "last.ckpt")
    old = lightning.fit(lightning.Contrastive(items), path, max_epochs=1, **QUIET)
    load_from = lightning.Contrastive.load_from_checkpoint
    with pytest.raises(RuntimeError, match="skip_saved_state"):
        load_from(path, items=items[:20])
    new = load_from(path, items=items[:20], fine_tune=True)
    assert torch.equal(new.encoder[0].weight, old.encoder[0].weight)
    assert int(new.loss_fn.step) == 0 and new.loss_fn.num_samples == 20
    lightning.fit(new, path, max_epochs=1, **QUIET)


def test_chains_survive_on_both_ranks_of_lightnings_ddp(
    lightning, items, tmp_path, lenient
) -> None:
    """Issue 10.9: what a chain holds is never lost to rank 0's broadcast."""

    class Watched(lightning.Contrastive):
        def on_train_start(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_train_batch_end(self, *_) -> None:
            self.seen.append(self.loss_fn.chains.states[0] >= 0)

        def on_train_end(self) -> None:
            state = {"seen": torch.stack(self.seen), "step": self.loss_fn.step}
            torch.save(state, tmp_path / f"rank{self.global_rank}.pt")

    options = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
    lightning.fit(Watched(items), str(tmp_path / "last.ckpt"), **options, **QUIET)
    for rank in range(2):
        saved = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        seen = saved["seen"]
        assert len(seen) == int(saved["step"]) == 4  # two epochs of 24 samples, 16 at a time
        assert not (seen[:-1] & ~seen[1:]).any(), "a chain that had moved was lost"
        assert seen[-1].sum() > NUM // 4


# ---------------------------------------------------------------- plain, accelerate and lightly


@pytest.mark.parametrize("name", ["plain_torch", "accelerate"])
def test_it_resumes_exactly(name, items, tmp_path, capsys) -> None:
    pytest.importorskip(name.removeprefix("plain_"))
    example = load(f"with_{name}")
    example.train(items, range(0, 1), str(tmp_path / "a"))
    encoder, loss_fn = example.train(items, range(1, 2), str(tmp_path / "a"))
    expected, whole = example.train(items, range(0, 2), str(tmp_path / "b"))
    assert_same(snapshot(loss_fn), snapshot(whole))
    assert int(loss_fn.step) == 6
    assert_same(snapshot(encoder), snapshot(expected), atol=1e-6)


def test_lightly(capsys) -> None:
    pytest.importorskip("lightly")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        criterion = load("with_lightly").main(num=64, epochs=1)
    assert int(criterion.step) == 2
