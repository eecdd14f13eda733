"""Bytes in JSON, and names in paths of HTTP. Law: everything is read back exactly as it was written.

Bytes are stored separately, so that no user's value can be mistaken for them: in a state and in the service's JSON in a
second object beside that of the fields; in an exported file, where every other value is a string, as an object.

A name is one part of a path, percent-encoded. Some servers and proxies decode and normalize paths, so that `a%2Fb`
becomes two parts and `..` is removed. So below `/base64` each name is written in base64url, which no proxy changes. The
bytes of a name are its UTF-8; a lone surrogate is encoded the same way. A high surrogate before a low one is refused,
as everywhere: JSON reads them as one character, which would be another name.

Source: RFC 3986, section 2.4: a URI is split before its parts are decoded. RFC 4648, section 5.
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
    """Decode a text in base64. Raises InvalidValue."""
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise InvalidValue(f"{name!r:.80}: is not a string in base64")


def apart(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Separate JSON values (`fields`) from bytes in base64 (`bytes`, if there are any)."""
    encoded = {key: text_of(value) for key, value in fields.items() if isinstance(value, bytes)}
    found = {"fields": {key: value for key, value in fields.items() if key not in encoded}}
    return found | {"bytes": encoded} if encoded else found


def together(fields: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `apart`. Raises InvalidValue, also if a name is in both."""
    for key in encoded:
        if key in fields:
            raise InvalidValue(f"{key!r:.80}: is among the fields and among the bytes")
    return {**fields, **{key: bytes_of(text, key) for key, text in encoded.items()}}


BASE64 = "base64"
_PLAIN = re.compile(r"[A-Za-z0-9_:~-][A-Za-z0-9_.:~-]*")  # names that every decoder reads the same way


def quoted(name: str) -> str:
    """A name as one part of a path, percent-encoded."""
    return quote(_bytes(name), safe="")


def path(start: str, form: str, *names: str) -> str:
    """A path below `start` that no proxy changes: `form` has {} for each name, such as "/conversations/{}"."""
    if all(map(_PLAIN.fullmatch, names)):
        return start + form.format(*map(quoted, names))
    return f"{start}/{BASE64}" + form.format(*map(in_base64, names))


def in_base64(name: str) -> str:
    """A name in base64url without padding."""
    return base64.urlsafe_b64encode(_bytes(name)).decode().rstrip("=")


def read(part: bytes) -> str:
    """Decode the name in a percent-encoded part of a path. Raises ValueError."""
    return checked(unquote_to_bytes(part).decode("utf-8", "surrogatepass"))


def read_base64(part: bytes) -> str:
    """Decode the name in a base64url part of a path, padded or not. Raises ValueError if it is not base64url."""
    text = unquote_to_bytes(part).rstrip(b"=")
    name = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)).decode("utf-8", "surrogatepass")
    # The decoder skips unknown characters, so one name would have many paths.
    if in_base64(name).encode() != text:
        raise ValueError("it has characters, or bits, that are not base64url")
    return name


def checked(name: str) -> str:
    """Return the name. Raises InvalidValue if JSON would change it."""
    refuse_pair(name, "name")
    return name


def _bytes(name: str) -> bytes:
    return checked(name).encode("utf-8", "surrogatepass")
