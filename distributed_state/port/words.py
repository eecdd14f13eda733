"""Commands as Redis reads them. Law: a word is encoded here and nowhere else, by code that may be interrupted.

hiredis can write commands as well. It asks a number for its text and takes that for granted: a signal handler that
raises meanwhile, or an integer too long to be written, ended the interpreter (SIGSEGV in `pack_command`).

Design: section 19.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_HEADS = [b"$%d\r\n" % length for length in range(1000)]


def encode(word: Any) -> bytes:
    """One word as bytes. Raises TypeError for what is none, and ValueError for what cannot be written."""
    if type(word) is bytes:
        return word
    if isinstance(word, str):
        return word.encode()
    if type(word) is int:
        return b"%d" % word
    if isinstance(word, float):
        return float.__repr__(word).encode()  # not its own, which may be anybody's code
    if isinstance(word, bytes | memoryview):
        return bytes(word)
    raise TypeError(f"a word of a command is bytes, str, int or float, not {type(word).__name__}")


def write(words: Iterable[Any]) -> bytes:
    """The bytes of words, as they stand behind their number."""
    parts: list[bytes] = []
    for word in words:
        if (kind := type(word)) is not bytes:
            word = word.encode() if kind is str else b"%d" % word if kind is int else encode(word)
        length = len(word)
        parts += (_HEADS[length] if length < 1000 else b"$%d\r\n" % length, word, b"\r\n")
    return b"".join(parts)


def packed(words: Sequence[Any]) -> bytes:
    """The bytes of one command."""
    return b"*%d\r\n%b" % (len(words), write(words))
