"""The register of methods: names, aliases, one's own."""

from __future__ import annotations

import pytest
import torch

from negchain import DCLLoss, EMC2Loss, InBatch, Informed, estimator_report
from negchain.methods import METHODS, LossSettings, Method, named, register
from negchain.train.resolve import resolve

M, DIM = 20, 4


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name) -> None:
    method = METHODS[name]
    assert method.name == name and method.title and len(method.colour) == 2
    for denominator in ("negatives", "all"):
        settings = LossSettings(M, 5.0, DIM, seed=3, denominator=denominator)
        loss_fn = named(name).build(settings)
        assert loss_fn.denominator == (method.denominator or denominator)
        table = torch.randn(M, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def encode(ids, t=table):
            return t[ids]

        loss_fn.fill(encode)
        for _ in range(2):
            z = table[:6]
            loss_fn(z, z.roll(1, 1), torch.arange(6), encode=encode).backward()
        assert torch.isfinite(table.grad).all() and table.grad.abs().max() > 0


def test_names_and_aliases() -> None:
    assert named("simclr") is METHODS["infonce"]
    with pytest.raises(ValueError, match="one of infonce, dcl.* got 'emc3'"):
        named("emc3")
    assert len({method.colour for method in METHODS.values()}) == len(METHODS)


def test_options_reach_the_loss() -> None:
    def built(name: str, **options) -> EMC2Loss:
        loss_fn = named(name).build(LossSettings(M, options=options))
        assert isinstance(loss_fn, EMC2Loss)
        return loss_fn

    assert built("emc2", burn_in=0.25).kernel.burn_in == 0.25
    assert built("isir", carried="cached").carried == "cached"
    assert built("emc2", proposal="informed", refresh=0.2).proposals == Informed(refresh=0.2)
    assert built("emc2", proposal="both").proposals == InBatch(2)
    assert built("isir", proposal="both").proposals == InBatch(2)
    assert built("emc2", augmentations=3).proposals == InBatch(2)
    assert built("emc2", augmentations=3).ids_per_item == 3
    assert built("isir", augmentations=3).proposals == InBatch(1)  # both copies: biased
    assert named("sogclr").build(LossSettings(M, options={"gamma": 0.3})).gamma == 0.3
    for name, method in METHODS.items():
        for option in method.options:  # what the command line offers is read by somebody
            value = {"carried": "cached", "proposal": "informed"}.get(option, 0.5)
            named(name).build(LossSettings(M, options={option: value}))


def test_a_method_of_ones_own() -> None:
    def build(settings: LossSettings) -> DCLLoss:
        return DCLLoss(settings.num_samples, settings.beta, normalize=settings.normalize)

    register(Method("mine", "my DCL", ("#888", "#aaa"), build))
    try:
        z = torch.randn(M, DIM, generator=torch.Generator().manual_seed(0))
        report = estimator_report(z, batch_size=5, beta=4.0, steps=3, methods=["mine", "dcl"])
        mine, dcl = report.rows
        assert mine.relative_std == dcl.relative_std
    finally:
        METHODS.pop("mine")


def _never(settings: LossSettings) -> DCLLoss:
    raise AssertionError


def test_an_option_that_is_no_setting_is_refused_by_name() -> None:
    register(Method("own", "Own", ("#888", "#aaa"), _never, options=("strength",)))
    try:
        with pytest.raises(ValueError, match="an option of --method own .*'strength'"):
            resolve(None, {"method": "own"})
    finally:
        METHODS.pop("own")
