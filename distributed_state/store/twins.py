"""The blocking face and the asyncio objects behind it. Law: an object of the one has one of the other, and keeps it.

Design: section 16.
"""

from __future__ import annotations

from typing import Any


def twin_of(face: Any) -> Any:
    """The asyncio object behind an object of the blocking face; anything else as it is."""
    return getattr(face, "_twin", face)
