"""File names as text that is safe to show."""

import os
import unicodedata

_TURNING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # direction of writing


def printable(name: str) -> str:
    r"""`name` with what a terminal would obey written out: control characters, bytes not UTF-8.

    >>> printable("a\x1b[31m.png"), printable("日本.png")
    ('a\\x1b[31m.png', '日本.png')
    """
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c.encode("unicode_escape").decode() if _obeyed(c) else c for c in text)


def _obeyed(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Zl", "Zp") or character in _TURNING
