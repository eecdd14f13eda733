"""The shape of a JSON text, before it is read. Law: what is deep or has many parts costs no more than a look at it.

A parser makes an object of some 70 bytes of each `[]`, and one that calls itself for what is nested stops the loop.

Design: section 24.
"""

from __future__ import annotations

from distributed_state.errors import InvalidValue

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHER = bytes(set(range(256)) - set(b"[]{}"))
A_VALUE = 100  # bytes that a value takes when it is read, at most about, beside those of its text


def values(data: bytes, most: int, depth: int) -> int:
    """How many values a JSON text has, about. Raises InvalidValue if there are more than `most` or they lie deeper.

    Of a text that is no JSON the answer means nothing.
    """
    if data.count(b'"') > 4 * most:
        # Nor is it taken apart: the parts would be as many.
        raise InvalidValue(f"the body has more than {most} values")
    # A run of backslashes begins within a string, so pairs of them are taken from its left.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    outside = b"".join(plain.split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    found = outside.count(b",") + opened + 1
    if found > most:
        raise InvalidValue(f"the body has {found} values, more than {most}")
    if opened > depth:
        brackets = outside.translate(_BRACKETS, _OTHER)
        for _ in range(depth):
            # Each round takes away the innermost ones.
            brackets = brackets.replace(b"[]", b"")
        if brackets:
            raise InvalidValue(f"the body is nested deeper than {depth}, or its brackets are not closed")
    return found
