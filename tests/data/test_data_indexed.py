"""Samples with positions, and requests that come through the loader's workers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import negchain
from forked import fork
from negchain.data.indexed import Indexed, _Pairs, prefetch

NUM = 30
Loss = negchain.ContrastiveLoss


class Counted:
    """Items as (vector, label), counting what this process fetches."""

    def __init__(self) -> None:
        self.items = torch.randn(NUM, 5, generator=torch.Generator().manual_seed(0))
        self.fetched = 0

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        self.fetched += 1
        return self.items[position], position


def test_a_stream_has_no_positions() -> None:
    class Unnumbered(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.zeros(3, 2))

    class Counted(Unnumbered):
        def __len__(self) -> int:
            return 3

    for stream in (Unnumbered(), Counted()):
        with pytest.raises(ValueError, match="yields samples.*map-style"):
            Indexed(stream)
        with pytest.raises(ValueError, match="yields samples.*map-style"):
            next(prefetch(make("emc2"), stream, [[0, 1]]))


def make(method: str) -> Loss:
    if method == "infonce":
        return negchain.InfoNCELoss(NUM, 5.0)
    if method == "refreshed":  # four rows of its table a step; what it draws comes with the batch
        return negchain.ImportanceLoss(NUM, 5.0, negchain.Informed(num=3, refresh=0.12), dim=4)
    uniform = negchain.Uniform(6) if method == "uniform" else "batch"
    return negchain.EMC2Loss(NUM, 5.0, proposals=uniform)


def order(repeats: bool) -> list[Tensor]:
    """Two epochs; with repeats, neighbouring batches share samples."""
    generator = torch.Generator().manual_seed(2)
    if repeats:
        return [torch.randint(8, (6,), generator=generator).unique() for _ in range(12)]
    return [b for _ in range(2) for b in torch.randperm(NUM, generator=generator).split(6)]


def plain_loop(loss_fn: Loss, batches: list[Tensor]) -> list[float]:
    data, encoder = Counted(), torch.nn.Linear(5, 4)
    values = []
    for index in batches:
        request = loss_fn.request(index)
        if len(request.ids):
            request.answer(encoder(data.items[request.ids]))
        values.append(value_of(loss_fn, encoder, data.items[index], index, request))
    return values


def value_of(loss_fn: Loss, encoder: Any, vectors: Tensor, index: Tensor, first: Any) -> float:
    z = encoder(vectors)
    second = loss_fn.request(index, z, z + 0.1)
    second.answer(encoder(Counted().items[second.ids]))
    return float(loss_fn(z, z + 0.1, index, first, second).detach())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("method", ["infonce", "emc2", "uniform", "refreshed"])
def test_numbers_are_those_of_a_loop_without_prefetching(
    method: str, repeats: bool, workers: int
) -> None:
    torch.manual_seed(0)
    expected = plain_loop(make(method), order(repeats))
    torch.manual_seed(0)
    encoder, data, loss_fn = torch.nn.Linear(5, 4), Counted(), make(method)
    values, asked = [], 0
    for index, batch, request, items in prefetch(
        loss_fn, data, order(repeats), num_workers=workers
    ):
        vectors, labels = batch
        assert torch.equal(labels, index)
        if items is not None:
            assert torch.equal(items[1], request.ids)
            request.answer(encoder(items[0]))
            asked += len(request.ids)
        values.append(value_of(loss_fn, encoder, vectors, index, request))
    assert values == expected and (asked > 0 or method == "infonce")
    if workers:  # the main process fetches only what has changed since the workers were asked
        known = method in ("infonce", "refreshed")  # which rows are due does not change
        assert data.fetched == 0 if known else 0 < data.fetched <= asked // 2


def padded(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


@pytest.mark.parametrize("ids", [[0, 3, 2], [1, 3, 0], [1, 3, 2], [0, 4, 5]])
def test_padded_items_are_those_that_were_asked_for(ids: list[int]) -> None:
    """A batch is as wide as its longest item: rows of one need not fit into another."""
    words = [torch.full((6 if i == 0 else 1,), i) for i in range(NUM)]
    for had in ([0, 1, 2], [1, 1, 2]):
        stale = padded([words[i] for i in had])
        pairs = _Pairs(words, words, padded)
        found = pairs.renewed(stale, torch.tensor(had), torch.tensor(ids))
        assert torch.equal(found, padded([words[i] for i in ids]))


def summed(samples: list[Tensor]) -> dict[str, Tensor]:
    rows = torch.stack([sample[:1] for sample in samples])
    return {"rows": rows, "total": rows.sum()}


def joined(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As nn.EmbeddingBag takes them."""
    lengths = torch.tensor([0, *(len(sample) for sample in samples[:-1])])
    return torch.cat(samples), lengths.cumsum(0)


@pytest.mark.parametrize("collate", [summed, joined])
@pytest.mark.parametrize("ids", [[0, 3, 2], [0, 1, 5]])
def test_what_is_of_the_whole_batch_is_of_what_was_asked_for(collate: Any, ids: list[int]) -> None:
    """A sum was an error, and a text of one word was put into the place of another's second."""
    words = [torch.full((6 if i == 0 else 1,), i) for i in range(NUM)]
    stale, had = collate([words[i] for i in [0, 1, 2]]), torch.tensor([0, 1, 2])
    found = _Pairs(words, words, collate).renewed(stale, had, torch.tensor(ids))
    torch.testing.assert_close(found, collate([words[i] for i in ids]))


def test_items_with_names_are_those_that_were_asked_for() -> None:
    """Strings among what a data set yields, and neighbouring batches that share samples."""
    data = [(torch.tensor(i), f"name {i}") for i in range(NUM)]
    loss_fn, renewed = make("emc2"), 0
    for index, _, request, items in prefetch(loss_fn, data, order(True), num_workers=1):
        assert items[0].tolist() == request.ids.tolist()
        assert list(items[1]) == [f"name {i}" for i in request.ids.tolist()]
        request.answer(torch.randn(len(request.ids), 4))
        before = loss_fn.held(torch.arange(NUM))[0]
        loss_fn(torch.randn(len(index), 4), torch.randn(len(index), 4), index, request)
        renewed += int((loss_fn.held(torch.arange(NUM))[0] != before).sum())
    assert renewed  # chains moved while later batches were on their way


def test_items_may_come_from_a_data_set_of_their_own() -> None:
    views, one = TensorDataset(torch.zeros(NUM, 2), torch.zeros(NUM, 2)), torch.arange(NUM)
    steps = prefetch(make("emc2"), views, [torch.arange(4)], wanted=one)
    _, batch, request, items = next(steps)
    assert len(batch) == 2 and torch.equal(items, request.ids)


def test_samples_begin_with_their_position() -> None:
    loader: Any = DataLoader(Indexed(Counted()), batch_size=4)
    index, vectors, labels = next(iter(loader))
    assert torch.equal(index, labels) and vectors.shape == (4, 5)
    assert Indexed(torch.arange(3) * 10)[2] == (2, torch.tensor(20)) and len(Indexed([1, 2])) == 2


USERS = ("torchvision", "timm", "lightly", "open_clip", "transformers", "sentence_transformers")


def test_torchvision_is_not_needed() -> None:
    def import_without() -> None:
        for name in [*sys.modules]:
            if name.split(".")[0] in ("negchain", *USERS):
                del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        importlib.import_module("negchain.data.indexed")
        with pytest.raises(ImportError):
            importlib.import_module("negchain.data.sources")

    child = fork(import_without)
    child.join()
    assert child.exitcode == 0
