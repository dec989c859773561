"""`load_data`: from what the user writes after `--data` to image sets.

Built in    digits (scikit-learn, nothing to download), cifar10, stl10 (torchvision; 105,000
            images, and stl10-unlabeled without the 5,000 that probes are fitted on).
A folder    see `negchain.data.folder` for the layouts.
A table     a CSV file with the columns `path` and `label`, there too.
Shards      .tar files: one, `a-{0000..0009}.tar`, or a folder of them (`negchain.data.shards`).
Saved       a folder that Hugging Face's `save_to_disk` wrote (`negchain.data.arrow`).
Several     `A,B`: pretraining on all of them, positions running source after source; probes use
            the labels of the first source that has them.

A folder that has the name of a built-in set is reached by writing `./digits`.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from negchain.augment.pictures import Images, Pictures, joined
from negchain.data.built_in import load_built_in
from negchain.data.decode import Size, num_cores
from negchain.data.from_files import choose_storage, load_files, read_sizes
from negchain.data.image_set import DataBundle, ImageSet, fingerprint
from negchain.data.listing import Listing
from negchain.data.named import BUILT_IN, lister, named_sources
from negchain.printable import counted, printable

MIXED_SIDE = 96
"""Side for folders whose images differ in size, unless `image_size` says otherwise (STL-10's)."""

LARGEST_COMMON_SIDE = 224
"""A size that all images share is kept up to this side (ImageNet's), unless told otherwise."""


def load_data(
    data: str | Listing,
    *,
    image_size: int | None = None,
    root: str | Path = "data",
    download: bool = False,
    strict: bool = False,
    resident_bytes: int = 8 << 30,
    holdout: float = 0.2,
    num_workers: int | None = None,
    progress: bool = True,
) -> DataBundle:
    """The image sets that `data` names: a built-in set, a folder, a CSV file, or `A,B,...`.

    Args:
        data: names and folders, with commas between several; or files that are listed already.
        image_size: side in pixels of what the encoder sees. None: what a built-in set has; for
            folders the shorter side that all images share, at most 224, or 96 if they differ
            (`notes` then says so).
        root: where cifar10 and stl10 are kept.
        download: fetch cifar10 or stl10 if `root` has not got them.
        strict: refuse unreadable files instead of leaving them out.
        resident_bytes: how much the pictures may take; decides at which size they are kept, and
            whether they stay on disk (see `negchain.data.from_files`).
        holdout: share of each class held out to test probes, where there is no test split.
        num_workers: threads that decode; None: one per core.
        progress: show a bar with the remaining time on stderr.

    >>> bundle = load_data("digits")
    >>> len(bundle.pretrain), len(bundle.test), bundle.pretrain.channels, bundle.pretrain.size
    (1438, 359, 1, (8, 8))
    >>> load_data("digit")
    Traceback (most recent call last):
    ValueError: --data 'digit' is neither a folder nor one of digits, cifar10, stl10, stl10-unlabeled; did you mean digits?
    """  # noqa: E501
    workers = num_cores() if num_workers is None else max(1, num_workers)
    if isinstance(data, str):
        entries = named_sources(data)
        listings = {name: files(name, holdout) for name in entries if (files := lister(name))}
    else:
        entries, listings = ["listed"], {"listed": data}
    sizes = dict[str, list[Size]]()
    sides = {entry: [side] for entry, side in BUILT_IN.items() if entry in entries}
    for entry, listing in listings.items():
        places = [file.place for file in listing.pretrain + listing.test]
        title = f"measuring {printable(Path(listing.root).name)}" if progress else None
        sizes[entry] = read_sizes(places, workers=workers, title=title)
        sides[entry] = [min(size) for size in sizes[entry] if size != (0, 0)]
    known = [size for found in sizes.values() for size in found]
    side, notes = (image_size, ()) if image_size is not None else _default_side(sides.values())
    storage = choose_storage(known, side, resident_bytes)
    if not storage.resident and len(listings) < len(entries):
        raise ValueError(
            f"built-in sets are kept in memory and {len(known)} images of {side} px exceed the "
            f"{resident_bytes} bytes allowed; lower --image-size, or give folders alone"
        )

    def load(entry: str) -> DataBundle:
        if entry not in listings:
            return load_built_in(entry, side, Path(root), download)
        listed = listings[entry], sizes[entry]
        return load_files(*listed, storage, strict=strict, workers=workers, progress=progress)

    bundle = _combine(entries, [load(entry) for entry in entries])
    notes += (storage.note,) if storage.note else ()
    if bundle.held_out and bundle.test is not None and bundle.test.labels is not None:
        each = f"{holdout:.0%} of each of {len(bundle.classes)} classes"
        if untested := len(bundle.classes) - len(set(bundle.test.labels.tolist())):
            each += f" but {untested} with too few images"
        notes += (
            f"no test split: {counted(bundle.held_out, 'image is', 'images are')} held out to test "
            f"probes, {each}, and not pretrained on; --holdout sets the share",
        )
    native = max((int(statistics.median(found)) for found in sides.values() if found), default=side)
    return replace(bundle, notes=notes + bundle.notes, native=native)


def _default_side(sides: Iterable[Sequence[int]]) -> tuple[int, tuple[str, ...]]:
    """(side, notes): what the pictures of all sources share, or `MIXED_SIDE`."""
    found = set[int]().union(*sides)
    if len(found) == 1:
        side = found.pop()
        if side <= LARGEST_COMMON_SIDE:
            return side, ()
        note = f"images of {side} px are seen at {LARGEST_COMMON_SIDE} px"
        return LARGEST_COMMON_SIDE, (f"{note}; --image-size sets another side",)
    note = f"images of different sizes are seen at {MIXED_SIDE} px; --image-size sets another side"
    return MIXED_SIDE, (note,)


def _combine(entries: Sequence[str], bundles: Sequence[DataBundle]) -> DataBundle:
    """One bundle that pretrains on all; labels are those of the first that can be probed."""
    if len(bundles) == 1:
        return bundles[0]
    names = [bundle.name for bundle in bundles]
    titles = [n if n not in names[:k] else f"{n}#{k + 1}" for k, n in enumerate(names)]
    # Names of built-in sets begin with the set already.
    prefixes = ["" if e in BUILT_IN else f"{t}/" for e, t in zip(entries, titles, strict=True)]
    bundles = [_under(prefix, bundle) for prefix, bundle in zip(prefixes, bundles, strict=True)]
    probed = min(bundles, key=lambda bundle: (not bundle.labelled, bundle.train is None))
    parts = list[ImageSet]()
    for bundle in bundles:
        labels = bundle.pretrain.labels if bundle is probed else None
        parts.append(replace(bundle.pretrain, labels=labels))
        if bundle is not probed and bundle.test is not None and bundle.held_out:
            parts.append(replace(bundle.test, labels=None))  # it tests nothing here
    pretrain = _concatenate(parts)
    prints = [(t, int(b.fingerprint, 16)) for t, b in zip(titles, bundles, strict=True)]
    return replace(
        probed,
        name="+".join(titles),
        pretrain=pretrain,
        skipped=tuple(pair for bundle in bundles for pair in bundle.skipped),
        fingerprint=fingerprint(prints, [], (pretrain.channels, *pretrain.size)),
        notes=tuple(note for bundle in bundles for note in bundle.notes),
        unprobed=bundles[0].unprobed,
    )


def _under(prefix: str, bundle: DataBundle) -> DataBundle:
    """`bundle` with its source's name before those of its files."""

    def named(part: ImageSet) -> ImageSet:
        return replace(part, names=tuple(prefix + name for name in part.names))

    return replace(
        bundle,
        pretrain=named(bundle.pretrain),
        train=bundle.train and named(bundle.train),
        test=bundle.test and named(bundle.test),
        skipped=tuple((prefix + file, why) for file, why in bundle.skipped),
        notes=tuple(f"{prefix} {note}" for note in bundle.notes),
    )


def _concatenate(parts: Sequence[ImageSet]) -> ImageSet:
    labels = None
    if any(part.labels is not None for part in parts):
        labels = torch.cat(
            [torch.full((len(p),), -1) if p.labels is None else p.labels for p in parts]
        )
    images = [part.images for part in parts if part.images is not None]
    whole: Images | None = None
    if any(part.whole is not None for part in parts):
        tables = [part.table for part in parts if part.table is not None]
        whole = joined([t if isinstance(t, Pictures) else Pictures.of(t) for t in tables])
    return replace(
        parts[0],
        names=tuple(name for part in parts for name in part.names),
        labels=labels,
        images=torch.cat(images) if images else None,
        places=None if images else tuple(p for part in parts for p in part.places or ()),
        whole=whole,
    )
