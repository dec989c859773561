"""The register is the one place where a method has a name; a method of your own needs no other."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import negchain
from negchain import methods

ROOT = Path(__file__).resolve().parents[1]


def test_a_method_of_your_own_is_measured_trained_and_drawn(tmp_path, monkeypatch, capsys) -> None:
    example = ROOT / "examples" / "own_method.py"
    source = example.read_text()
    assert len(source.splitlines()) < 150
    few = ["--epochs", "1", "--subset", "64", "--steps", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(example), *few])
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        methods.METHODS.pop("hard", None)
    assert re.search(r"^hard +\d", capsys.readouterr().out, re.M)  # in the estimator report
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "Hard DCL" in page and "--hard: #7b3fb8;" in page and "var(--hard)" in page


class _Plain(negchain.WeightedLoss):
    def weigh(self, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(logits, 1), torch.logsumexp(logits, 1)


@pytest.mark.parametrize("index", [[3], [2, 2]])
def test_rows_without_negatives_train_nothing_whatever_the_weights(index: list[int]) -> None:
    """A loader's last batch may hold one sample: its softmax over nothing is NaN."""
    z = torch.randn(len(index), 4, requires_grad=True)
    found = [kind(10, 5.0)(z, z.detach() + 0.1, index) for kind in (_Plain, negchain.DCLLoss)]
    gradients = [torch.autograd.grad(value, z)[0] for value in found]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(*gradients)


def test_a_method_that_is_half_written_is_told_what_lacks() -> None:
    class Nothing(negchain.WeightedLoss):
        pass

    class Weights(negchain.WeightedLoss):
        def weigh(self, logits, ids):  # type: ignore[no-untyped-def,override]
            return torch.softmax(logits, 1)

    z = torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="Nothing must have weigh"):
        Nothing(10, 5.0)(z, z, [0, 1])
    for size in (1, 2):  # two rows would be taken for the two results
        with pytest.raises(ValueError, match="weigh must return weights .* and the log of a sum"):
            Weights(10, 5.0)(z[:size], z[:size], [0, 1][:size])


@pytest.mark.parametrize("name", ["step", "sizes", "faults", "rows", "tables", "training"])
def test_state_has_a_name_of_its_own(name: str) -> None:
    """It would be lost, or stand in the place of the loss's own."""
    with pytest.raises(ValueError, match=f"a name that is free.*'{name}'"):
        negchain.WeightedLoss(10, 5.0).add_state(name, torch.zeros(10))


def test_weights_are_never_differentiated() -> None:
    """Through weights with parameters of their own a similarity would be learned, not a loss."""
    sharpness = torch.nn.Parameter(torch.ones(()))

    class Own(negchain.WeightedLoss):
        def weigh(self, logits, ids):  # type: ignore[no-untyped-def,override]
            logits = logits.clamp(min=-1e9) * sharpness
            return logits.softmax(1), logits.logsumexp(1)

    Own(10, 5.0)(*torch.randn(2, 3, 4).requires_grad_(), [0, 1, 2]).backward()
    assert sharpness.grad is None


def test_an_estimate_over_the_data_set_needs_its_size() -> None:
    class Own(negchain.WeightedLoss):
        def weigh(self, logits, ids):  # type: ignore[no-untyped-def,override]
            return logits.softmax(1), None

    with pytest.raises(ValueError, match="num_samples=None; give its size, or return logits"):
        Own(None, 5.0)(*torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    "answer",
    [
        lambda weights, log_sum: (weights,),
        lambda weights, log_sum: (weights, log_sum, log_sum),
        lambda weights, log_sum: (weights, log_sum[:, None]),  # [N, 1] would spread to [N, N]
        lambda weights, log_sum: (weights, 0.0),
        lambda weights, log_sum: (weights.numpy(), log_sum),
        lambda weights, log_sum: (1.0, log_sum),
    ],
)
def test_weigh_is_told_what_its_results_must_be(answer: Callable[..., Any]) -> None:
    class Own(negchain.WeightedLoss):
        def weigh(self, logits, ids):  # type: ignore[no-untyped-def,override]
            return answer(torch.softmax(logits, 1), logits.logsumexp(1))

    with pytest.raises(ValueError, match=r"weigh must return weights \[6, 6\] and .* sum \[6\]"):
        Own(10, 5.0)(*torch.randn(2, 3, 4), [0, 1, 2])


def test_no_other_file_lists_methods() -> None:
    """Two names of methods in one line of source are a list."""
    name = "|".join(n for n in methods.trained() if n != "isir")
    listed = re.compile(rf"[\"']({name})[\"'].*[\"']({name})[\"']")
    for path in (ROOT / "src").rglob("*.py"):
        if path.name == "methods.py" or "fused" in path.parts:  # fused: names of kernels
            continue
        code = re.sub(r"^ *(>>>|\.\.\.).*$", "", path.read_text(encoding="utf-8"), flags=re.M)
        assert not listed.search(code), path


def test_names_and_aliases() -> None:
    assert methods.named("simclr").name == "infonce"
    with pytest.raises(ValueError, match="must be one of infonce, dcl"):
        methods.named("moco")
    with pytest.raises(ValueError, match="small letters"):
        methods.register(methods.Method("Bad name", "", ("", ""), lambda settings: None))  # type: ignore[arg-type,return-value]
    assert "emc2-cached" not in methods.trained() and "emc2-cached" in methods.METHODS
