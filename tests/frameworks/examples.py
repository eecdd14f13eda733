"""The examples in the docstrings of adapters. Law: each is true as it stands."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any


async def run_examples(kind: type, **names: Any) -> int:
    """Run each indented block after a line that ends in `::`, of a class and its methods; how many there are."""
    documented = [kind, *(each for each in vars(kind).values() if inspect.isfunction(each))]
    blocks = [
        textwrap.dedent(block)
        for each in documented
        for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(each.__doc__ or "") + "\n")
    ]
    for block in blocks:
        waiting = eval(
            compile(block, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True), names
        )
        if waiting is not None:
            await waiting
    return len(blocks)
