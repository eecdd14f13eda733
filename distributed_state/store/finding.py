"""What a doctor says of one thing that it looked at. Law: what is not ok says what to do.

Design: section 27.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` says what to do when it is not `ok`."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    fatal: bool = False

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "advice", "")
