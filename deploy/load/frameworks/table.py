"""The table in which adapters stand beside the frameworks' own stores: between two comments of its page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deploy.load.rows import Row

BEGIN, END = "<!-- begin: adapters.py -->", "<!-- end: adapters.py -->"
MISSED = ("", ", **missed**")
HEAD = ["| what | measured | compared with | ratio | goal |", "|---|---|---|---|---|"]


def table(rows: Iterable[Row]) -> list[str]:
    """One line a row, as Markdown."""
    return [
        f"| {row.name} | {row.measured} | {row.baseline} | {row.ratio:.3g}x | {row.goal}{MISSED[not row.reached]} |"
        for row in rows
    ]


def write(rows: Iterable[Row], document: Path) -> None:
    """Put them into the document; rows of frameworks that were not measured now stay."""
    text = document.read_text()
    found = re.search(rf"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{document} has no {BEGIN} and {END}")
    new = table(rows)
    measured = {line.split(":")[0] for line in new}
    kept = [line for line in found[1].splitlines() if line.startswith("| ") and line not in HEAD]
    lines = [*(line for line in kept if line.split(":")[0] not in measured), *new]
    body = "\n".join([BEGIN, *HEAD, *sorted(lines, key=lambda line: line.split(":")[0]), END])
    document.write_text(text[: found.start()] + body + text[found.end() :])
