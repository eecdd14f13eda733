"""Examples in docstrings. Law: what is shown there runs as it stands."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from types import CodeType
from typing import Any


def examples(documented: Any) -> list[str]:
    """Each indented block after a line that ends in `::`."""
    text = inspect.cleandoc(documented.__doc__ or "") + "\n"
    return [textwrap.dedent(block).strip() for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", text)]


def compiled(example: str) -> CodeType:
    """An example, which may await."""
    return compile(example, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
