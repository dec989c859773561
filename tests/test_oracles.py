"""The oracle against closed forms, finite differences and autograd's view of the same formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracles
from oracles import Row, contrastive_dense, corpus_rows, exact, paired_rows, shared_rows
from oracles.exact import target, view_pairs

KNOWN = [[2, 3], [], [0], [1], [5], []]  # not mutual
LAYOUTS = {
    "shared": lambda: shared_rows(5),
    "shared-one-way": lambda: shared_rows(5, symmetric=False),
    "shared-known": lambda: shared_rows(6, known=KNOWN),
    "shared-equal-ids": lambda: shared_rows(5, ids=[4, 1, 4, 2, 1]),
    "views": lambda: shared_rows(4, num_views=3, copies=3),
    "paired": lambda: paired_rows(5),
    "paired-one-way-known": lambda: paired_rows(6, symmetric=False, known=KNOWN),
    "paired-views": lambda: paired_rows(4, views=(2, 3)),
    "corpus": lambda: corpus_rows([(0, 1), (1, 1), (2, 6)], 3, 8, known=[[0], [], [1, 2]]),
}
every_layout = pytest.mark.parametrize("rows", [f() for f in LAYOUTS.values()], ids=list(LAYOUTS))


def table_for(rows: list[Row], seed: int = 0) -> np.ndarray:
    size = 1 + max(max(row.anchor, row.positive, *row.negatives) for row in rows)
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 3)) * np.exp(rng.normal(size=(size, 1)))


@every_layout
@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_gradients_are_finite_differences_of_the_value(rows, denominator) -> None:
    table, beta, step = table_for(rows), 3.0, 1e-6
    result = exact(rows, table, beta, denominator)
    for at in np.ndindex(table.shape):
        values = []
        for sign in (1, -1):
            moved = table.copy()
            moved[at] += sign * step
            values.append(exact(rows, moved, beta, denominator).value)
        assert abs((values[0] - values[1]) / (2 * step) - result.gradient[at]) < 1e-7
    high, low = (exact(rows, table, beta + d, denominator).value for d in (step, -step))
    assert abs((high - low) / (2 * step) - result.beta) < 1e-7


@every_layout
def test_shares_sum_to_one_and_nobody_is_its_own_negative(rows) -> None:
    assert math.isclose(sum(row.share for row in rows), 1)
    for row in rows:
        assert row.anchor not in row.negatives and row.positive not in row.negatives
        assert len(set(row.negatives)) == len(row.negatives)


def test_closed_form_of_two_orthogonal_items() -> None:
    """All similarities but those of equal embeddings are 0: p is uniform, p+ is known."""
    table, beta = np.eye(3) * 2.0, 1.5
    rows = shared_rows(3)
    assert math.isclose(exact(rows, table, beta).value, -beta + math.log(4))
    assert np.allclose(target(rows[0], table, beta), 0.5)
    factor = 4 / (4 + math.exp(beta))
    assert math.isclose(exact(rows, table, beta, "all").value, math.log(4 + math.exp(beta)) - beta)
    assert math.isclose(exact(rows, table, beta, "all").beta, -factor)
    # an item is pushed from the two others as anchor and as negative; |e| = 2, both views count
    push = exact(rows, table, beta).negative[0]
    assert np.allclose(push, [0.0, beta / 6, beta / 6])


def test_sets_of_negatives() -> None:
    assert shared_rows(3)[0].negatives == [1, 2]
    assert shared_rows(3, num_views=2)[0].negatives == [2, 3, 4, 5]
    corpus = corpus_rows([(0, 2), (1, 2)], 2, 5, known=[[4], []])
    assert [row.negatives for row in corpus] == [[2, 3, 5], [2, 3, 5, 6]]  # keys start at 2
    known = paired_rows(3, known=[[1], [], []])
    assert [row.negatives for row in known] == [[5], [3, 5], [3, 4], [2], [0, 2], [0, 1]]
    assert view_pairs(1) == [(0, 0)] and len(view_pairs(3)) == 6


@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_agrees_with_autograd_of_the_dense_formula(views, denominator) -> None:
    """Two independent ways to the same numbers; equal views, since z_a and z_b share a table."""
    rows = shared_rows(6) if views == "shared" else paired_rows(6)
    table = torch.tensor(table_for(rows), requires_grad=True)
    z_a, z_b = (table, table) if views == "shared" else (table[:6], table[6:])
    value = contrastive_dense(z_a, z_b, 4.0, views=views, denominator=denominator)
    value.backward()
    result = exact(rows, table.detach().numpy(), 4.0, denominator)
    assert math.isclose(result.value, value.item(), rel_tol=1e-12)
    assert np.allclose(result.gradient, table.grad, atol=1e-12)


def test_a_row_without_negatives_contributes_nothing() -> None:
    result = exact([Row(1.0, 0, 1, [], 1.0)], np.eye(2), 3.0)
    assert result.value == 0 and not result.gradient.any()


def test_the_oracle_stands_alone() -> None:
    """It would prove nothing if it shared code with what it judges."""
    import pathlib

    for file in pathlib.Path(oracles.__file__).parent.glob("*.py"):
        assert "negchain" not in file.read_text().split('"""', 2)[2]
