"""The examples in the docstrings of adapters. Law: each is true as it stands."""

from __future__ import annotations

import inspect
from typing import Any

from docstrings import compiled, examples


async def run_examples(kind: type, **names: Any) -> int:
    """Run the examples of a class and its methods, which may use these names; how many there are."""
    documented = [kind, *(each for each in vars(kind).values() if inspect.isfunction(each))]
    blocks = [block for each in documented for block in examples(each)]
    for block in blocks:
        waiting = eval(compiled(block), dict(names))
        if waiting is not None:
            await waiting
    return len(blocks)
