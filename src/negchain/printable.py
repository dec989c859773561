"""Text of other people (names of files, settings) made safe to show; numbers with their nouns."""

from __future__ import annotations

import reprlib

_repr = reprlib.Repr()
_repr.maxstring = 160  # paths should survive


def printable(text: str) -> str:
    r"""The text with unprintable characters written out, so that no terminal obeys them.

    Control characters, line breaks, changes of the direction of writing and other invisible ones
    become escapes, and so do bytes of a file name that are not UTF-8.

    >>> print(printable("a\x1b[2J\udcff\n.png"), printable("日本 [/].png"))
    a\x1b[2J\xff\n.png 日本 [/].png
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _written(c) for c in text)


def _written(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python holds a byte that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def counted(number: int, one: str, many: str) -> str:
    """A number before the words that go with it.

    >>> counted(1, "image is", "images are"), counted(1200, "image is", "images are")
    ('1 image is', '1,200 images are')
    """
    return f"{number:,} {one if number == 1 else many}"


def plain(value: object) -> str:
    """A setting's value with all its digits: two that differ are never written alike.

    >>> plain(20.0), plain(5e-05), plain("auto")
    ('20', '5e-05', 'auto')
    """
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def reason(error: BaseException) -> str:
    """What an error says, on one line: its first, or its type where it says nothing.

    >>> reason(ValueError("too short\\nsee above")), reason(KeyboardInterrupt())
    ('too short', 'KeyboardInterrupt')
    """
    return str(error).split("\n")[0] or type(error).__name__


def show(value: object) -> str:
    """Return `value` as it appears in messages: on one line, and short whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print huge ones
        return f"an integer of {value.bit_length()} bits"
    return _repr.repr(value)
