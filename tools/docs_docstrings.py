"""What of the source is shown, and docstrings as Markdown: an example is a block of Python. Law: no other change."""

from __future__ import annotations

import re
from typing import Any

from generate_blocking import INNER
from griffe import Extension

EXAMPLE = re.compile(r"::\n\n((?:    .*\n|\n)+)")


class Examples(Extension):
    """What mkdocstrings asks for each object that it has read."""

    def on_object(self, *, obj: Any, **more: Any) -> None:
        """Mark the examples of its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = marked(obj.docstring.value)

    def on_class_members(self, *, cls: Any, **more: Any) -> None:
        """Leave out what is public for other modules' sake."""
        for name in INNER.get(cls.name, ()):
            cls.members.pop(name, None)


def marked(text: str) -> str:
    """The same docstring, each indented block behind `::` in a fence."""

    def fenced(match: re.Match[str]) -> str:
        lines = [line.removeprefix("    ") for line in match[1].rstrip().split("\n")]
        return "\n".join([":\n", "```python", *lines, "```", "", ""])

    return EXAMPLE.sub(fenced, text + "\n").rstrip()
