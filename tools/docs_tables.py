"""Pages of the reference that are tables: settings, events, errors. Law: each row is read from the code it is about."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from distributed_state import Settings, errors
from distributed_state.events.types import TYPES
from distributed_state.programs.service.answers import STATUS


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown. A bar in a cell is no border."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (re.sub(r"\s*\n\s*", " ", cell).replace("|", "\\|") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def code(text: Any) -> str:
    """Text as code; none of nothing."""
    return f"`{text}`" if str(text) else ""


def settings() -> str:
    """What `open()` takes."""
    rows = []
    for name, each in Settings.model_fields.items():
        default = f"{each.default:,}" if type(each.default) is int else repr(each.default).replace("'", '"')
        bounds = [f"{sign} {value:,}" for sign, value in _bounds(each.metadata)]
        rows.append((f'<span id="{name}"></span>`{name}`', str(each.description), code(default), ", ".join(bounds)))
    return "\n\n".join([
        "# Settings",
        "Keyword arguments of `open()`, or environment variables named `DISTRIBUTED_STATE_` and the setting in "
        "capitals: `DISTRIBUTED_STATE_MAX_STALENESS=0.5`. An argument overrides a variable. Times are in seconds, "
        "sizes in bytes.",
        table(("setting", "what it is", "default", "allowed"), rows),
        "::: distributed_state.settings.Settings\n    options:\n      members: [of]",
    ])  # fmt: skip


def _bounds(metadata: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for each in metadata:
        for name, sign in ("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"):
            if hasattr(each, name):
                yield sign, getattr(each, name)


def events() -> str:
    """What the package publishes by itself."""
    parts = [
        "# Events",
        "An event is published in the same commit as the change, kept in a stream, and archived. A handler receives an "
        "[Event](notices.md). The package publishes the types below. Publish your own types, under other names, with "
        "`store.emit`.",
        table(("event", "about", "when"), ((f"[`{e.name}`](#{_anchor(e.name)})", e.subject, e.when) for e in TYPES)),
    ]
    for each in TYPES:
        parts += [f"## `{each.name}` {{ #{_anchor(each.name)} }}", each.when, f"Its subject is {each.subject}."]
        if each.data:
            parts.append(table(("data", "what it is"), ((code(name), text) for name, text in each.data.items())))
        else:
            parts.append("It has no data.")
    return "\n\n".join(parts)


def _anchor(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def raised() -> list[type[errors.StateError]]:
    """Every error, its bases before it, as the tree at the top of errors.py has them."""
    order = re.findall(r"(\w+) {2,}\S", inspect.getdoc(errors) or "")
    return [errors.StateError, *(getattr(errors, name) for name in order)]


def error_page() -> str:
    """What may be raised, why, and what to do about it."""
    rows = []
    for each in raised():
        cause, remedy = cause_and_remedy(each)
        status = next((STATUS[kind] for kind in each.__mro__ if kind in STATUS), 500)
        rows.append((f"[`{each.__name__}`][distributed_state.errors.{each.__name__}]", cause, remedy, str(status)))
    tree = re.search(r"( {4}StateError\n.*?)\n\n", inspect.getdoc(errors) or "", re.DOTALL)
    parts = [
        "# Errors",
        "Every error of this package is a `StateError`. A service answers with the HTTP status in the table, or with "
        "412 if the failed condition was given in a header of the request (`If-Match`, `Lease`).",
        table(("error", "cause", "remedy", "HTTP"), rows),
        "## The tree",
        "```text\n" + (inspect.cleandoc(tree[1]) if tree else "") + "\n```",
        "## Each",
        *(f"::: distributed_state.errors.{each.__name__}\n    options:\n      heading_level: 3" for each in raised()),
    ]
    return "\n\n".join(parts)


def cause_and_remedy(error: type[errors.StateError]) -> tuple[str, str]:
    """The first paragraph of its docstring, and the last; the root of them all has no remedy of its own."""
    first, *rest = (inspect.getdoc(error) or "").split("\n\n")
    remedy = next((each.removeprefix("Remedy:").strip() for each in rest if each.startswith("Remedy:")), "")
    return first, remedy[:1].upper() + remedy[1:]
