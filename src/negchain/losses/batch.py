"""A user's batch: checked, brought to float32 or better, and laid out as sides.

Everything wrong that can be seen without waiting for a device is refused here, before any state
changes. What only the device knows (an index out of range, a non-finite embedding) is refused at
once on a CPU; on a GPU the sample is marked invalid, changes no state, and is reported by `info`.

Shapes: `B` batch, `N` rows, `D` embedding, `L` known positives per sample, `R` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from negchain.losses.settings import Given
from negchain.objective import SHORTEST
from negchain.pool import Draw, Kind, Side, all_finite, matches
from negchain.rng import fit_for_numpy

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss

P = ParamSpec("P")
T = TypeVar("T")
Views = Literal["shared", "paired"]
Draws = Draw | tuple[Draw, Draw]
Drawn = Tensor | tuple[Tensor, Tensor]
Ids = Tensor | Sequence[int]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a loss."""

    z_a: Tensor
    z_b: Tensor
    index: Ids | None
    key_index: Ids | None = None
    known: Ids | None = None
    augmentation: tuple[Tensor, Tensor] | None = None
    draw: Draws | None = None
    drawn: Drawn | None = None
    one_way: bool = False

    def kept(self) -> Call:
        """The same call with ids of its own: a loop may fill one buffer again and again."""
        names = "index", "key_index", "known", "augmentation"
        return replace(self, **{name: kept(getattr(self, name)) for name in names})


@dataclass(frozen=True)
class Batch:
    """B pairs of embeddings with their data set positions."""

    both: Tensor  # [2,B,D] z_a and z_b: one operation does for the two
    index: Tensor  # [B] positions among the anchors, clamped into range
    key_index: Tensor  # [B] positions of z_b among the keys, clamped into range
    known: Tensor | None  # [B,L]
    valid: Tensor  # [B] bool: finite and in range
    faults: Tensor | None  # [2] int64: samples non-finite, out of range; None: none, as was seen


def check_batch(loss_fn: ContrastiveLoss, call: Call) -> Batch:
    """Refuse what is wrong, convert what is right; see the module's header."""
    check_call(loss_fn, call)
    both = as_embedding(torch.stack([call.z_a, call.z_b]), loss_fn.normalize)
    size, device = both.shape[1], both.device
    if size == 0:
        raise ValueError("a batch must hold at least one sample, got none; skip an empty batch")
    index = positions(call, loss_fn.num_samples)
    keys = index if call.key_index is None else as_ids("key_index", call.key_index, size, device)
    known = None if call.known is None else as_ids("known", call.known, size, device, dims=2)
    batch = Batch(both, index, keys, known, torch.ones_like(index, dtype=torch.bool), None)
    if not fit_for_numpy(both):
        return _marked(loss_fn, batch)
    _refuse(index, "index", loss_fn.num_samples)
    if keys is not index:
        _refuse(keys, "key_index", loss_fn.num_keys)
        given = loss_fn.training and loss_fn._kept_as["key_counts"].given
        if given and not (loss_fn.proposals.alone or bool(loss_fn.key_counts[keys].all())):
            raise ValueError(
                "key_counts must count all pairs a loss is trained on, and counts none of keys "
                f"{keys[loss_fn.key_counts[keys] == 0].tolist()[:5]}; count these, or leave it out"
            )
    if known is not None:
        _refuse(known[known != -1], "known, padded with -1,", loss_fn.num_positions)
    if not all_finite(both):
        rows = torch.nonzero(~finite_rows(both)).flatten().tolist()[:5]
        raise ValueError(
            f"embeddings must be finite, but rows {rows} hold NaN or inf; lower the learning "
            "rate, clip gradients, or skip the batch"
        )
    return batch


def _marked(loss_fn: ContrastiveLoss, batch: Batch) -> Batch:
    """A batch whose values cannot be looked at: what is wrong is marked, not refused."""
    index, in_range = _clamped(batch.index, loss_fn.num_samples)
    keys = index
    if batch.key_index is not batch.index:
        keys, known_key = _clamped(batch.key_index, loss_fn.num_keys)
        in_range = in_range & known_key
    finite = finite_rows(batch.both)
    faults = torch.stack([(~finite).sum(), (~in_range).sum()])
    return Batch(batch.both, index, keys, batch.known, in_range & finite, faults)


def finite_rows(both: Tensor) -> Tensor:  # [2,B,D] -> [B] bool
    """Which samples have two finite embeddings."""
    return torch.isfinite(both).all(2).all(0)


def positions(call: Call, num_samples: int | None) -> Tensor:  # [B]
    """The positions of a batch's anchors; a loss without a size takes them to be all different."""
    size, device, index = len(call.z_a), call.z_a.device, call.index
    if index is None and num_samples is None:
        index = torch.arange(size, device=device)
    return as_ids("index", index, size, device)


def check_call(loss_fn: ContrastiveLoss, call: Call) -> None:
    """Refuse what is wrong whatever the values are."""
    z_a, z_b, num_samples, num_keys = call.z_a, call.z_b, loss_fn.num_samples, loss_fn.num_keys
    if z_a.dim() != 2 or z_a.shape != z_b.shape:
        raise ValueError(
            "z_a and z_b must be embeddings of one shape [B, D], "
            f"got {tuple(z_a.shape)} and {tuple(z_b.shape)}"
        )
    if not z_a.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {z_a.dtype}")
    if (call.key_index is None) != (num_keys is None):
        raise ValueError(
            "key_index= (positions of z_b among the keys) goes with num_keys= at construction; got "
            f"key_index {'missing' if call.key_index is None else 'given'} and num_keys={num_keys}"
        )
    if call.one_way and num_samples is not None:
        raise ValueError(
            "one_way=True is for losses without state of the other direction, got num_samples="
            f"{num_samples}; build the loss with symmetric=False"
        )
    if call.draw is not None and not isinstance(loss_fn.proposals, Given):
        raise ValueError("draw= goes with proposals=Given() at construction; leave it out")


def lay_out(
    loss_fn: ContrastiveLoss,
    batch: Batch,
    *,
    one_way: bool = False,  # z_a's rows alone are anchors
    key_ids: Tensor | None = None,  # [2,B] names of the columns of stored augmentations
    coin: Tensor | None = None,  # [B] bool
    items: slice = slice(None),  # whose rows; all items are columns
) -> list[Side]:
    """The sides of a batch: one for shared views, one or two for paired ones.

    With a coin and shared views a row is offered one copy of every item: rows of the first view
    z_a's where the coin is True, rows of the second view the other.
    """
    side = partial(_side, loss_fn, batch, items, _positives(batch, items))
    symmetric = loss_fn.symmetric and not one_way
    both = batch.both
    if loss_fn.views == "paired":
        z_a, z_b = both.unbind()
        sides = [side(z_a[items], z_b[items], z_b[None], batch.key_index[None])]
        if symmetric:
            sides.append(side(z_b[items], z_a[items], z_a[None], batch.index[None]))
        return sides
    swapped = both.flip(0)
    pair = (both, swapped) if items == slice(None) else (both[:, items], swapped[:, items])
    rows, positives = (z.flatten(0, 1) if symmetric else z[0] for z in pair)
    names = batch.index.expand(2, -1) if key_ids is None else key_ids
    if coin is None:
        columns = both.flatten(0, 1)[None]
        return [side(rows, positives, columns, names.reshape(1, -1), copies=2)]
    keys = torch.where(coin[:, None], both, swapped)
    hidden = keys.detach().flip(0)
    ids = names if key_ids is None else torch.where(coin, names, names.flip(0))
    if not symmetric:
        keys, hidden, ids = keys[:1], hidden[:1], ids[:1]
    return [side(rows, positives, keys, ids, hidden_keys=hidden)]


def _positives(batch: Batch, items: slice) -> Tensor:  # -> [rows of `items`, B] bool
    """Which samples are no negatives of a row: its own, known ones, and invalid ones."""
    index, own, known = batch.index, batch.key_index, batch.known
    mask = matches(own, own[items], None if known is None else known[items])
    if own is not index:  # a corpus: another key of the row's anchor is a positive of it too
        mask = mask | (index[None, :] == index[items][:, None])
    return mask if batch.faults is None else mask | ~batch.valid[None, :]


def _side(
    loss_fn: ContrastiveLoss,
    batch: Batch,
    items: slice,
    excluded: Tensor,
    rows: Tensor,
    positives: Tensor,
    keys: Tensor,
    ids: Tensor,
    **more: Any,
) -> Side:
    """A side whose rows and columns are one or more copies of what `excluded` is about."""
    anchors, own = batch.index[items], batch.key_index
    copies = rows.shape[0] // anchors.shape[0]
    anchor_ids = repeated(anchors, copies)
    if excluded.shape != (rows.shape[0], keys.shape[1]):
        wide = torch.cat([excluded] * (keys.shape[1] // excluded.shape[1]), 1)
        excluded = repeated(wide, copies)
    uniform = Kind(0, keys.shape[1], (~excluded).sum(1), None)  # over the row's negatives
    return Side(
        queries=rows,
        positives=positives,
        anchor_ids=anchor_ids,
        positive_ids=anchor_ids if own is batch.index else repeated(own[items], copies),
        known=None if batch.known is None else batch.known[items].repeat(copies, 1),
        keys=keys,
        key_ids=ids,
        excluded=excluded,
        multiplicity=loss_fn.multiplicity,
        ids_per_item=loss_fn.ids_per_item,
        num_keys=loss_fn.num_positions,
        kinds=(uniform,),
        views=copies,
        **more,
    )


def as_embedding(z: Tensor, normalize: bool) -> Tensor:
    """float32 or better, then unit length (in this order: half precision cannot hold the norm)."""
    z = z if z.dtype == torch.float64 else z.float()
    if not normalize:
        return z
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if fit_for_numpy(z) and bool((norm.detach().numpy() > SHORTEST).all()):
        unit: Tensor = z / norm  # the same in fewer operations
        return unit
    return torch.where(norm > SHORTEST, z / norm.clamp_min(SHORTEST), z.detach() * 0)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Products in the precision of their factors; nothing to do where autocast is off."""
    kind = like.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """A method that `torch.compile` takes into no graph of its own.

    A graph keeps the state it was given for its backward pass, and a loss changes that state in
    place before then: autograd refuses it, where it notices. Looking for the compiler at each call
    spares everybody else its import.
    """

    @wraps(method)
    def call(*args: P.args, **more: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            outside: Callable[P, T] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return outside(*args, **more)
        return method(*args, **more)

    return call


def is_traced(z: Tensor) -> bool:
    """Whether torch.func is at work: then no value may be looked at, and nothing be kept."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(z))


def as_ids(
    name: str, ids: Ids | None, rows: int | None, device: torch.device, dims: int = 1
) -> Tensor:
    """Integer ids as int64 on the embeddings' device; `rows` of them, None: any number."""
    if ids is None:
        raise ValueError(f"{name}= is missing: pass the data set positions of the batch, [B]")
    size = "B" if rows is None else rows
    shape = f"[{size}]" if dims == 1 else f"[{size}, L], padded with -1"
    remedy = f"pass {'an integer' if dims == 1 else 'a row of integers'} per sample"
    try:
        ids = ids if isinstance(ids, Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError) as reason:
        raise ValueError(
            f"{name} must be integers {shape}, got {ids!r:.99} ({reason}); {remedy}"
        ) from reason
    fits = ids.dim() == dims and rows in (None, ids.shape[0])
    if not fits or ids.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be integers {shape}, got {ids.dtype} {tuple(ids.shape)}; {remedy}"
        )
    # contiguous: kernels read them one after another
    return ids.to(device=device, dtype=torch.int64, non_blocking=True).contiguous()


def kept(ids: Any) -> Any:
    """Ids as they are now, whatever holds them; of a GPU as they are when used (a graph's are)."""
    if isinstance(ids, tuple):  # of two views
        return tuple(kept(each) for each in ids)
    if isinstance(ids, Tensor):
        return ids if ids.is_cuda else ids.clone()
    return deepcopy(ids)


def repeated(ids: Tensor, copies: int) -> Tensor:  # [B,...] -> [copies * B,...]
    """What is the same for a batch's rows of every view, view after view."""
    return ids if copies == 1 else torch.cat([ids] * copies)  # repeat takes several times as long


def _clamped(ids: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """Ids brought into [0, size), and which were there."""
    if size is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    return ids.clamp(0, size - 1), (ids >= 0) & (ids < size)


def check_answer(z: Tensor, ids: Tensor, like: Tensor, normalize: bool) -> Tensor:
    """Embeddings [R, D] that answer a request for R ids, brought to the batch's form and finite."""
    z = as_embedding(z, normalize).to(like.dtype)
    if fit_for_numpy(z) and not all_finite(z):
        bad = ids.flatten()[~torch.isfinite(z).all(1)].tolist()[:5]
        raise ValueError(
            f"embeddings that answer a request must be finite, but those of ids {bad} hold NaN or "
            "inf; lower the learning rate, clip gradients, or skip the batch"
        )
    return z


def asked_positions(loss_fn: ContrastiveLoss, index: Ids) -> Tensor:  # [B]
    """The positions of a batch that a caller asks about, before it is encoded.

    Over several ranks the call that follows refuses what is out of range, on all of them at once.
    """
    ids = as_ids("index", index, None, loss_fn.step.device)
    if fit_for_numpy(ids) and loss_fn.ranks() is None:
        _refuse(ids, "index", loss_fn.num_samples)
    return ids


def _refuse(ids: Tensor, name: str, size: int | None) -> None:
    if size is None:
        return
    values = ids.numpy()
    bad = values[(values < 0) | (values >= size)].tolist()
    if bad:
        raise ValueError(
            f"{name} must hold data set positions in [0, {size}), got {bad[:5]}; "
            "was the loss built for another data set?"
        )
