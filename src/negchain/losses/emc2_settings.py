"""Which settings of EMC² go together; everything else is refused with a reason."""

from __future__ import annotations

from negchain.losses.batch import Views
from negchain.losses.chains import Carried
from negchain.losses.walk import WalkOrder


def check_settings(
    burn_in: float,
    partition_rate: float,
    augmentations: int | None,
    num_draws: int | None,
    views: Views,
    proposal: str,
) -> None:
    """Refuse settings outside their range, or that contradict each other."""
    if not 0 <= burn_in < 1:
        raise ValueError(f"burn_in (share of the proposals) must be in [0, 1), got {burn_in}")
    if not 0 <= partition_rate <= 1:
        raise ValueError(f"partition_rate must be in [0, 1], got {partition_rate}")
    if augmentations is not None and (
        augmentations < 1 or views != "shared" or proposal == "cache"
    ):
        raise ValueError(
            "augmentations (stored per item) must be at least 1, with views='shared' and a "
            f"proposal other than 'cache'; got {augmentations}, {views!r}, {proposal!r}"
        )
    if num_draws is not None and (num_draws < 1 or proposal != "cache"):
        raise ValueError(f"num_draws (at least 1) goes with proposal='cache', got {num_draws}")


def check_large(count_every: int, stream: bool, walk: WalkOrder, proposal: str) -> None:
    """The same for the settings of large batches."""
    if count_every < 1:
        raise ValueError(
            "count_every must be at least 1 (every c-th state, or one column of every c); "
            f"got {count_every}"
        )
    if stream and (walk != "parallel" or proposal != "batch"):
        raise ValueError(
            "stream=True goes with walk='parallel' and proposal='batch', "
            f"got walk={walk!r} and proposal={proposal!r}"
        )


def check_call(mode: Carried, proposal: str, stream: bool, carried: object, draw: object) -> None:
    """Refuse arguments of a call that are missing or that the settings do not use."""
    if mode == "encode" and carried is None:
        raise ValueError(
            "carried= is missing: with carried='encode' pass the embeddings of the negatives "
            "the chains hold, carried=encoder(items[loss_fn.carried(index)]); or construct the "
            "loss with carried='cached' or 'score'"
        )
    if mode != "encode" and carried is not None:
        raise ValueError(f"carried= is not used with carried={mode!r}; leave it out")
    if stream and draw is not None:
        raise ValueError("stream=True takes negatives from the batch only; leave draw= out")
    if proposal != "batch" and draw is None:
        source = "loss_fn.propose(z_a, index)" if proposal == "cache" else "your draws"
        raise ValueError(f"proposal={proposal!r} needs draw= and drawn=: pass {source}")
