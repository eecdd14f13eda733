"""The pages of the reference. Law: each is made from what it describes; nothing is written twice."""

from __future__ import annotations

from collections.abc import Iterator

from docs_commands import command_page
from docs_http import http_pages
from docs_metrics import metric_page
from docs_python import overview, python_pages
from docs_servers import key_page, script_page, sql_page
from docs_tables import error_page, events, settings


def pages() -> Iterator[tuple[str, str]]:
    """Each page under reference/: its place without `.md`, and its Markdown."""
    python = list(python_pages())
    others = [
        ("errors", error_page()),
        ("settings", settings()),
        ("commands", command_page()),
        ("events", events()),
        *http_pages(),
        ("metrics", metric_page()),
        ("keys", key_page()),
        ("scripts", script_page()),
        ("sql", sql_page()),
    ]
    yield "index", _index(python, others)
    yield "python", overview()
    yield from python
    yield from others


def _index(python: list[tuple[str, str]], others: list[tuple[str, str]]) -> str:
    titled = [(place, text.removeprefix("# ").partition("\n\n")) for place, text in [*python, *others]]
    lines = {place: f"* [{title}]({place}.md)" for place, (title, _, _) in titled if not _is_part(place)}
    about = {place: text.partition("\n\n")[0] for place, (_, _, text) in titled}
    return "\n\n".join([
        "# Reference",
        "These pages are generated from the source. Each Python class has an asyncio and a sync version, the asyncio "
        "one first; search for its name or for one of its methods.",
        "## [Python](python.md)",
        "\n".join(f"{lines[place]}: {about[place]}" for place, _ in python),
        "## Other references",
        "\n".join(lines[place] for place, _ in others if place in lines),
    ])  # fmt: skip


def _is_part(place: str) -> bool:
    """Whether a page is reached by another one."""
    return "/" in place and not place.endswith("/index")
