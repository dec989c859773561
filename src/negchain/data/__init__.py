"""Data: from digits, torchvision sets and folders of images to sets with stable positions.

All of it is imported when it is first used: `negchain.data.indexed` needs torch only, the others
what `negchain[train]` installs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negchain.data.image_set import DataBundle, ImageSet, load_batches
    from negchain.data.indexed import Indexed, Prefetched, prefetch
    from negchain.data.named import BUILT_IN
    from negchain.data.sources import load_data

__all__ = [
    "BUILT_IN",
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
_WHERE |= {"BUILT_IN": "named", "load_data": "sources"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
