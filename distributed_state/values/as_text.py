"""Bytes where only JSON goes, and names in paths of HTTP. Law: each comes out as it went in.

Bytes stand where no user's value does, so that no value can pass for them: in a state and in the service's JSON in an
object of their own, beside the one of the fields; in an exported file, in which every value is a string, as an object
in the place of that string.

A name is one part of a path, percent-encoded. Some servers and proxies decode paths and tidy them up, so that `a%2Fb`
becomes two parts and `..` is taken away: below `/base64` each name is written in base64url instead, which no proxy
changes. The bytes of a name are its UTF-8; those of a lone surrogate are what UTF-8 would make of it. A high surrogate
before a low one is refused, as everywhere: in JSON they are one character, and so another name.

Source: RFC 3986, section 2.4: a URI is taken apart before anything in it is decoded. RFC 4648, section 5.
Design: sections 11, 23.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from distributed_state.errors import InvalidValue
from distributed_state.values.model import refuse_pair


def text_of(data: bytes) -> str:
    """The bytes in base64."""
    return base64.b64encode(data).decode()


def bytes_of(text: Any, name: str) -> bytes:
    """The bytes that a text in base64 stands for. Raises InvalidValue."""
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise InvalidValue(f"{name!r:.80}: is not a string in base64")


def apart(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As `fields` those that are JSON, as `bytes` the others in base64, if there are any."""
    encoded = {key: text_of(value) for key, value in fields.items() if isinstance(value, bytes)}
    found = {"fields": {key: value for key, value in fields.items() if key not in encoded}}
    return found | {"bytes": encoded} if encoded else found


def together(fields: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
    """What `apart` took apart. Raises InvalidValue, also if a name is in both."""
    for key in encoded:
        if key in fields:
            raise InvalidValue(f"{key!r:.80}: is among the fields and among the bytes")
    return {**fields, **{key: bytes_of(text, key) for key, text in encoded.items()}}


BASE64 = "base64"
_PLAIN = re.compile(r"[A-Za-z0-9_:~-][A-Za-z0-9_.:~-]*")  # what is the same, or meant the same, wherever it is decoded


def quoted(name: str) -> str:
    """A name as one part of a path, percent-encoded."""
    return quote(_bytes(name), safe="")


def path(start: str, form: str, *names: str) -> str:
    """A path below `start` that every proxy leaves as it is: `form` has {} for each name, as "/conversations/{}"."""
    if all(map(_PLAIN.fullmatch, names)):
        return start + form.format(*map(quoted, names))
    return f"{start}/{BASE64}" + form.format(*map(in_base64, names))


def in_base64(name: str) -> str:
    """A name in base64url without padding."""
    return base64.urlsafe_b64encode(_bytes(name)).decode().rstrip("=")


def read(part: bytes) -> str:
    """The name that a percent-encoded part of a path stands for. Raises ValueError."""
    return checked(unquote_to_bytes(part).decode("utf-8", "surrogatepass"))


def read_base64(part: bytes) -> str:
    """The name that a part of a path stands for in base64url, padded or not. Raises ValueError for what is none."""
    text = unquote_to_bytes(part).rstrip(b"=")
    name = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)).decode("utf-8", "surrogatepass")
    # The decoder leaves out what it does not know: by that one name would have many paths.
    if in_base64(name).encode() != text:
        raise ValueError("it has characters, or bits, that are none of base64url")
    return name


def checked(name: str) -> str:
    """The name. Raises InvalidValue for one that JSON would change."""
    refuse_pair(name, "name")
    return name


def _bytes(name: str) -> bytes:
    return checked(name).encode("utf-8", "surrogatepass")
