"""Bytes where only JSON goes. Law: they stand where no user's value does, so that none can pass for them.

In a state and in the service's JSON they are in an object of their own, beside the one of the fields; in an exported
file, in which every value is a string, as an object in the place of that string.

Design: section 11.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from distributed_state.errors import InvalidValue


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
