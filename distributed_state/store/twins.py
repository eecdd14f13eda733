"""The blocking face and the asyncio objects behind it. Law: an object of the one has one of the other, and keeps it.

Design: section 16.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def twin_of(face: Any) -> Any:
    """The asyncio object behind an object of the blocking face; anything else as it is."""
    return getattr(face, "_twin", face)


def face_of(twin: Any) -> Any:
    """An object of the blocking face in front of a store, a session or a turn of asyncio."""
    # That face is written from this one and stands above it, so it can only be imported once it is asked for.
    return import_module("distributed_state.store.blocking").face(twin)
