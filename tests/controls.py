"""Negative controls: a guard is broken on purpose, so that the check that relies on it is seen to fail."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from distributed_state.port import Script
from distributed_state.warm import scripts


@contextmanager
def sabotage(script_name: str, old: str, new: str) -> Iterator[None]:
    """Run the block with `old` replaced by `new` in a Lua script of the package, as it is sent: with its includes."""
    script = next(each for each in vars(scripts).values() if isinstance(each, Script) and each.name == script_name)
    kept, sha = script.text, script.sha
    assert kept.count(old.encode()) == 1, f"{script_name}.lua holds {old!r} {kept.count(old.encode())} times"
    broken = kept.replace(old.encode(), new.encode())
    # `text` and `sha` are cached properties: what lies in __dict__ is what is sent.
    vars(script).update(text=broken, sha=hashlib.sha1(broken, usedforsecurity=False).hexdigest().encode())
    try:
        yield
    finally:
        vars(script).update(text=kept, sha=sha)
