"""Data: from what stands after `--data` to image sets with stable positions.

A folder of photographs takes this way:

    named.py                          what --data names, and who lists its files
    folder.py, shards.py, arrow.py    list them by split; nothing is opened yet
    listing.py                        where the bytes are; which are trained on, which test probes
    decode.py                         from bytes to pixels
    from_files.py                     all files measured, then decoded or left on disk
    built_in.py                       digits, cifar10, stl10 instead of files
    image_set.py                      the result: `ImageSet`, `DataBundle`, and batches of them
    sources.py                        `load_data`: all of this, for one source or several

`indexed.py` is for your own loop and any data set; it needs torch only, the others what
`negchain[train]` installs. So every name here is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negchain.data.image_set import DataBundle, ImageSet, load_batches
    from negchain.data.indexed import Indexed, Prefetched, prefetch
    from negchain.data.sources import load_data

__all__ = [
    "DataBundle",
    "ImageSet",
    "Indexed",
    "Prefetched",
    "load_batches",
    "load_data",
    "prefetch",
]
_WHERE = dict.fromkeys(("DataBundle", "ImageSet", "load_batches"), "image_set")
_WHERE |= dict.fromkeys(("Indexed", "Prefetched", "prefetch"), "indexed")
_WHERE["load_data"] = "sources"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
