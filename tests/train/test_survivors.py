"""--carried-gradient sampled: carried images are scored first, a sample of survivors is trained."""

from __future__ import annotations

import pytest
import torch

from negchain.train import step as step_module
from negchain.train import trainer
from negchain.train.config import ConfigError, resolve
from negchain.train.run_folder import RunFolder

STEPS = 300


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on digits whose chains have few proposals, so that many carried states survive."""
    settings = {"batch_size": 8, "method": "emc2", "beta": 40.0, "burn_in": 0.2, "norm": "none"}
    config = resolve(None, {**settings, "device": "cpu", "data": "digits", "steps": 10})
    data = trainer.load_images(config, False)
    path = tmp_path_factory.mktemp("survivors") / "run"
    run = trainer.prepare(config, data, lambda: RunFolder.create(path, config="{}\n"))
    run.step.optimizer.step = lambda: None  # parameters stay: only gradients are looked at
    run.step.loss_fn.eval()  # and chains
    yield run
    run.folder.close()


def gradient(run, step: int) -> torch.Tensor:
    run.step(step, torch.arange(8))
    return torch.cat([p.grad.flatten().clone() for p in run.encoder.parameters()])


def test_equals_one_pass_where_all_survivors_fit(run, monkeypatch) -> None:
    monkeypatch.setattr(step_module, "SURVIVORS", 1)
    for step in range(3):
        monkeypatch.setattr(run.step, "score_first", False)
        joint = gradient(run, step)
        monkeypatch.setattr(run.step, "score_first", True)
        assert torch.allclose(gradient(run, step), joint, atol=1e-5)


def test_expected_gradient_is_that_of_one_pass(run, monkeypatch) -> None:
    """Of 8 carried images one can be trained. False alarms: 1e-3.

    Both sides are averaged over the same steps, and their difference is read along the direction of
    what the carried images' own gradient adds.
    """
    monkeypatch.setattr(step_module, "SURVIVORS", 8)
    monkeypatch.setattr(run.step, "score_first", False)
    joint = torch.stack([gradient(run, step) for step in range(STEPS)])
    monkeypatch.setattr(run.step, "score_first", True)
    apart = torch.stack([gradient(run, step) for step in range(STEPS)])
    monkeypatch.setattr(
        run.step.passes, "backward_both", lambda z, grad, _: run.step.passes.backward(z, grad)
    )
    never = torch.stack([gradient(run, step) for step in range(STEPS)])
    carried = (joint - never).mean(0)  # what the carried images' own gradient adds
    direction = carried / carried.norm()

    def z_score(found: torch.Tensor) -> float:
        difference = (found - joint) @ direction
        return float(difference.mean() / (difference.std() / STEPS**0.5))

    assert abs(z_score(apart)) < 3.29
    assert abs(z_score(never)) > 2 * 3.29  # the planted bug: survivors are never trained
    assert (apart - joint).norm() > 1e-3 * joint.norm()  # and a sample it was


def test_priority_sampling_without_its_weights_is_caught(run, monkeypatch) -> None:
    """The planted bug: the chosen image keeps its own weight. False alarms: none known."""
    monkeypatch.setattr(step_module, "SURVIVORS", 8)
    monkeypatch.setattr(run.step, "score_first", False)
    joint = torch.stack([gradient(run, step) for step in range(STEPS)])
    monkeypatch.setattr(run.step, "score_first", True)
    apart = torch.stack([gradient(run, step) for step in range(STEPS)])
    monkeypatch.setattr(torch.Tensor, "maximum", lambda length, _: length)
    unweighted = torch.stack([gradient(run, step) for step in range(STEPS)])
    direction = (joint - unweighted).mean(0)
    direction = direction / direction.norm()
    biases = [float(((found - joint) @ direction).mean()) for found in (apart, unweighted)]
    assert abs(biases[1]) > 3 * abs(biases[0])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "isir"}, ("--carried-gradient", "--method emc2")),
        ({"carried": "score"}, ("--carried encode", "--carried score")),
        ({"norm": "batch"}, ("--norm batch", "--norm none")),
    ],
)
def test_refused_where_it_would_be_wrong(settings, words) -> None:
    given = {"method": "emc2", "norm": "none", "data": "digits", "carried_gradient": "sampled"}
    assert resolve(None, given).carried_gradient == "sampled"
    with pytest.raises(ConfigError) as refused:
        resolve(None, {**given, **settings})
    assert all(word in str(refused.value) for word in words)
