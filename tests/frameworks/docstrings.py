"""Examples in the docstrings of adapters. Law: what is shown is run."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any


async def run_example(documented: Any, **names: Any) -> None:
    """Run the example of a docstring, which may await, with these names."""
    text = inspect.getdoc(documented) or ""
    _, found, rest = text.partition("Example::\n")
    assert found, f"{documented} has no example"
    shown = itertools.takewhile(lambda line: not line[:1].strip(), rest.splitlines())  # as far as it is indented
    code = compile(textwrap.dedent("\n".join(shown)), "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(code, dict(names))
    if waiting is not None:
        await waiting
