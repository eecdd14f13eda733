"""The log of a record's answered requests, so that each is served only once. Law: one field each, for the last few.

The field holds a list: the version with which the request began, and, in a session, its outcome, its id, and its
changes to the session's user (see `turn_user`). A negative version marks a request that a fork inherited from its
source. The server notes the version of the request's commit before the list, because inputs may be posted meanwhile.

`rollback`, `restore_state` and `clear` do not change these fields.

Design: section 13.
"""

from __future__ import annotations

import re
from functools import partial
from hashlib import sha256
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.field_ttl import NOTED
from distributed_state.values.model import REQUEST

_VERSION = re.compile(rb"\[(-?\d+)")  # matches if the stored list is not encrypted


def name_of(request_id: str | None) -> bytes | None:
    """The field that stores a request; None for one without an id. Raises InvalidValue for an invalid id."""
    if request_id is None:
        return None
    if not isinstance(request_id, str) or not 0 < len(request_id.encode("utf-8", "surrogatepass")) <= 256:
        raise InvalidValue(f"a request id is a str of 1 to 256 bytes, not {request_id!r:.80}")
    if request_id[0] == "#":
        raise InvalidValue(f"request id {request_id!r:.80}: those that begin with '#' are slots")
    return REQUEST + request_id.encode("utf-8", "surrogatepass")


def slot_of(name: str) -> bytes:
    """The field that stores the last request of a slot, whatever its id. Raises InvalidValue for an invalid name."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogatepass")) <= 256:
        raise InvalidValue(f"a slot is a str of 1 to 256 bytes, not {name!r:.80}")
    return REQUEST + b"#" + name.encode("utf-8", "surrogatepass")


def tag_of(name: bytes) -> str:
    """A short name of a request, by its field, that may be shown; no other id can be found that has the same."""
    return sha256(name).hexdigest()[:32]


def answer_to(entry: CachedRecord, tag: str) -> list[Any] | None:
    """The stored list of the answered request with this tag, None if the record does not have it."""
    for field in [name for name in entry.fields if name[:2] == REQUEST]:
        kept = find(entry, field)
        own = name_of(kept[2]) if kept and len(kept) > 2 else None
        if own is not None and tag_of(own) == tag:
            return kept
    return None


def find(entry: CachedRecord, request: bytes) -> list[Any] | None:
    """The stored list of an answered request, with the version before its commit; None if the record lacks it."""
    stored = entry.fields.get(request)
    if stored is None:
        return None
    begun, *rest = entry.codec.decode(stored, codec.decode_key(request))
    version = field_ttl.noted(stored)
    return [begun if version is None else version - 1, *rest]


def answered_at(kept: list[Any]) -> int:
    """The version that a request's commit made; for a request that a fork inherited, the fork's first version."""
    return max(int(kept[0]), 0) + 1


def add(most: int, changes: Changes, entry: CachedRecord, request: bytes, kept: list[Any]) -> None:
    """Note that a request was answered, and drop old requests so that `most` are kept."""
    form = entry.codec
    changes.answered(request, form.encode(kept, codec.decode_key(request)))
    known = [(name, data) for name, data in entry.fields.items() if name[:2] == REQUEST and name != request]
    too_many = len(known) + 1 - most
    if too_many > 0:
        known.sort(key=partial(_begun, form))
        for name, _ in known[:too_many]:
            changes.reserved(name, None)


def _begun(form: Codec, kept: tuple[bytes, bytes]) -> int:
    """The place of a request in the log. Only this part of the list is decoded, as the outcome may be large."""
    noted = NOTED.match(kept[1])
    if noted is not None:
        return int(noted[1])
    version = _VERSION.match(kept[1])
    return int(version[1] if version else form.decode(kept[1], codec.decode_key(kept[0]))[0])
