"""Issue "The core under attack", what needs no statistics: each failure is planted again.

The ordinary test of the matter passes, and with the plant it must not. What needs long runs is
planted in `test_planted.py`, `test_enumerated.py`, `test_corpus.py` and `train/test_converges.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import test_corpus
import test_found
import test_requests
import test_state
import test_table
import test_values
import test_walk
import torch
from battery_plants import (
    first_that_moved_is_stored,
    held_state_is_dropped_and_repeats_count,
    lonely_rows_are_dropped,
)
from losses_under_test import METHODS, data, run
from torch import Tensor
from torch.overrides import TorchFunctionMode

import negchain.losses.base as base
import negchain.losses.batch as batch
import negchain.losses.emc2 as emc2
import negchain.losses.softmax as softmax
import negchain.losses.state as state
import negchain.losses.table as table
import negchain.losses.walk as walk
from negchain import EMC2Loss, InfoNCELoss, LargeBatchEMC2Loss, NegativeCacheLoss
from negchain.losses.state import Stateful
from negchain.weights.metropolis import scan_reference

# ---------------------------------------------------------------- plants


def corpus_columns_pass_for_the_corpus(patch) -> None:
    patch.setattr(softmax, "without_probabilities", lambda side: side)


def every_state_fits(patch) -> None:
    patch.setattr(Stateful, "_fits", lambda self, name, saved: True)


def nobody_asks_whether_chains_moved(patch) -> None:
    patch.setattr(base, "check_held", lambda *call: None)


def state_is_a_buffer(patch) -> None:
    def add(self, name, value, **_):
        self.register_buffer(name, value)

    patch.setattr(Stateful, "add_state", add)


def casts_reach_state(patch) -> None:
    right = Stateful._apply

    def cast(self, fn, recurse=True):
        right(self, fn, recurse)
        self._state = {name: fn(value) for name, value in self._state.items()}
        return self

    patch.setattr(Stateful, "_apply", cast)


def tables_are_made_in_inference_mode(patch) -> None:
    class Torch:
        inference_mode = staticmethod(lambda mode=True: contextlib.nullcontext())

        def __getattr__(self, name):
            return getattr(torch, name)

    patch.setattr(state, "torch", Torch())


def one_probability_per_item(patch) -> None:
    patch.setattr(EMC2Loss, "num_ids", property(lambda self: self.num_positions))


def values_are_looked_at(patch) -> None:
    patch.setattr(batch, "fit_for_numpy", lambda z: z.device.type == "cpu")


def directions_of_nothing(patch) -> None:
    def as_embedding(z: Tensor, normalize: bool) -> Tensor:
        return torch.nn.functional.normalize(z.float(), dim=-1) if normalize else z

    patch.setattr(batch, "as_embedding", as_embedding)


def whole_table_at_once(patch) -> None:
    right = table.StaleTable.logits

    def whole(self, side, beta):
        yield slice(0, self.size), torch.cat([part for _, part in right(self, side, beta)], 1)

    patch.setattr(table.StaleTable, "logits", whole)


def one_operation_per_column(patch) -> None:
    patch.setattr(walk, "mh_scan", lambda a, b, c, d, backend, e: scan_reference(a, b, c, d, e))


def value_is_the_lower_end(patch) -> None:
    right = emc2.bracket
    patch.setattr(emc2, "bracket", lambda *given: (*right(*given)[:2], right(*given)[0]))


# ---------------------------------------------------------------- what they break


class Operations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") != "__get__"
        return function(*args, **(kwargs or {}))


def a_step_takes_few_operations(_) -> None:
    """A step of b = 16 is all overhead on a CPU; it took three times as many once."""
    net, items = data()
    loss_fn = METHODS["mh"].build(5.0)
    run(loss_fn, net, items, torch.arange(16))
    with Operations() as seen:
        run(loss_fn, net, items, torch.arange(16))
    assert seen.count < 290


def pair() -> tuple[Tensor, Tensor]:
    z = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return z[0], z[1]


Check = Callable[[pytest.MonkeyPatch], None]
CASES: dict[str, tuple[Check, Check]] = {
    "1 corpus": (
        corpus_columns_pass_for_the_corpus,
        lambda _: test_corpus.test_in_batch_losses_take_the_batch_as_it_is(),
    ),
    "4 no proposal": (
        lonely_rows_are_dropped,
        lambda _: test_values.test_a_row_without_a_usable_proposal_trains_on_its_carried_state(
            "mh"
        ),
    ),
    "6 i-SIR over repeats": (
        held_state_is_dropped_and_repeats_count,
        lambda _: test_walk.test_isir_with_repeated_items_leaves_p_invariant("paired"),
    ),
    "6 twice in a batch": (
        first_that_moved_is_stored,
        lambda _: test_found.test_an_item_that_stands_twice_in_a_batch_leaves_p_as_it_is("mh"),
    ),
    "7 another corpus": (
        every_state_fits,
        lambda _: test_state.test_a_state_of_another_corpus_is_refused(InfoNCELoss),
    ),
    "7 moved since": (
        nobody_asks_whether_chains_moved,
        lambda _: test_requests.test_a_chain_that_moved_since_is_refused("shared", 0),
    ),
    "9 DDP overwrites buffers": (
        state_is_a_buffer,
        lambda _: test_state.test_state_keeps_its_type_and_is_no_buffer(("mh", {})),
    ),
    "11 a batch of one": (
        lonely_rows_are_dropped,
        lambda _: test_values.test_a_batch_of_one_trains_on_its_carried_state("mh", "shared"),
    ),
    "12 a cast average": (
        casts_reach_state,
        lambda _: test_state.test_an_average_moves_on_after_a_cast(),
    ),
    "12 inference mode first": (
        tables_are_made_in_inference_mode,
        lambda _: test_state.test_a_first_call_under_inference_mode(
            lambda: NegativeCacheLoss(24), True
        ),
    ),
    "12 augmentations with probabilities": (
        one_probability_per_item,
        lambda _: test_values.test_stored_augmentations_with_probabilities_of_draws(),
    ),
    "12 torch.func": (values_are_looked_at, lambda _: test_state.test_torch_func(InfoNCELoss)),
    "12 torch.func, panels": (
        lambda patch: patch.setattr("negchain.losses.large_batch.is_traced", lambda z: False),
        lambda _: test_state.test_torch_func(LargeBatchEMC2Loss),
    ),
    "12 a zero vector": (
        directions_of_nothing,
        lambda _: test_state.test_a_zero_vector_has_no_gradient(("infonce", {})),
    ),
    "13 memory": (whole_table_at_once, test_table.test_memory_does_not_grow_with_the_table),
    "13 operations": (one_operation_per_column, a_step_takes_few_operations),
    "14 the value": (
        value_is_the_lower_end,
        lambda _: test_values.test_emc2_value_is_the_middle_of_a_bracket(pair(), "negatives", "mh"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failure_planted_again_is_noticed(name, monkeypatch) -> None:
    plant, check = CASES[name]
    check(monkeypatch)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception)):
        check(monkeypatch)
