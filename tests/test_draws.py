"""One number per random stream, all of them in `negchain.draws`."""

from __future__ import annotations

import re
from pathlib import Path

import negchain
from negchain import draws

REGISTER = {name: value for name, value in vars(draws).items() if name.startswith("STREAM_")}
LOSS_STREAMS = [value for value in REGISTER.values() if value < 16]


def test_no_two_purposes_share_a_number() -> None:
    """The loss's streams are shifted by 16 for the second direction."""
    others = [value for value in REGISTER.values() if value >= 16]
    used = [*LOSS_STREAMS, *(16 + value for value in LOSS_STREAMS), *others]
    assert len(set(used)) == len(used)
    assert len(LOSS_STREAMS) >= 7 and len(others) >= 3


def test_streams_are_registered_nowhere_else() -> None:
    root = Path(negchain.__file__).parent
    own = re.compile(r"^STREAM_\w+ = (?!tl\.constexpr\(draws\.)", re.MULTILINE)
    found = [str(p.relative_to(root)) for p in root.rglob("*.py") if own.search(p.read_text())]
    assert found == ["draws.py"]
