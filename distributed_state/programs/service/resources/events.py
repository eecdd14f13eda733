"""What a reader of events asks for. Law: the position in the header goes before the one in the query."""

from __future__ import annotations

from pydantic import Field

from distributed_state.programs.service.resources.shapes import Query


class Heard(Query):
    """Which events: `types` are names or patterns, several or separated by commas; `since` is where to go on."""

    types: list[str] = Field(default_factory=list)
    since: str | None = None
