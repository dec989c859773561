"""What `--data` names, and who lists its files.

Nothing here needs torch: a mistyped path is refused at once.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from negchain.data.arrow import is_saved, list_saved
from negchain.data.folder import list_folder, list_table
from negchain.data.listing import Listing
from negchain.data.shards import list_shards, shards_of
from negchain.printable import printable, show

BUILT_IN = {"digits": 8, "cifar10": 32, "stl10": 96, "stl10-unlabeled": 96}
"""Built-in sets and the side in pixels they are stored at unless `image_size` says otherwise."""


def named_sources(data: str) -> list[str]:
    """The sources `data` names; a folder or file whose own name has a comma is one source."""
    parts = [data] if os.path.exists(data) else [part.strip() for part in data.split(",")]
    names = ", ".join(BUILT_IN)
    for part in parts:
        if part in BUILT_IN or lister(part) is not None:
            continue
        if os.path.isfile(part):  # no error where a name is too long to be one
            raise ValueError(
                f"--data needs a folder, .tar shards that are not compressed or a .csv with "
                f"path,label, and {show(part)} is another file; name its folder, or unpack it"
            )
        near = difflib.get_close_matches(part, [*BUILT_IN, *_siblings(part)], 1)
        hint = f"did you mean {printable(near[0])}?" if near else "check the spelling of the path"
        raise ValueError(f"--data {show(part)} is neither a folder nor one of {names}; {hint}")
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise ValueError(f"--data names {show(twice[0])} more than once; name every source once")
    if len(parts) > 1 and "digits" in parts:
        raise ValueError(f"--data digits is grey and goes alone, got {show(data)}; leave it out")
    return parts


def lister(source: str) -> Callable[[str, float], Listing] | None:
    """Who lists the files of a source; None for a built-in set, and where nobody can."""
    if source in BUILT_IN:
        return None
    if is_saved(source):
        return list_saved
    if shards_of(source):
        return list_shards
    if os.path.isdir(source):
        return list_folder
    return list_table if source.lower().endswith(".csv") and os.path.isfile(source) else None


def _siblings(part: str) -> list[str]:
    """Folders beside the one that does not exist, spelled as the user would."""
    parent = Path(part).parent
    if not part or not parent.is_dir():
        return []
    return [str(parent / entry.name) for entry in parent.iterdir() if entry.is_dir()]
