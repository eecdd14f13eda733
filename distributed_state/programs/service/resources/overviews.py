"""A conversation as it is looked at. Law: what is too large is named, with its size, and hides nothing else."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Encoded, Messages, Query, Texts, Values, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.records import inspection
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.messages import Page
from distributed_state.values import bytes_as_text
from distributed_state.values.model import OWNER, PARENT, PHASE, Ref, Scope, unescape
from distributed_state.values.tags import tags_in

_NAMED = 200  # fields that are left out


class Looked(Query):
    """Which version, without one: as it is; and which messages: the last `limit` of those numbered below `before`.

    At most so many bytes of fields come, the shortest first, and as many of messages, the last first.
    """

    version: Version | None = None
    before: Version | None = None
    limit: Annotated[int, Field(ge=0, le=200)] = 30
    most: Annotated[int, Field(ge=0, le=2**24)] = 2**19


class LeftOut(Answer):
    """A field that did not fit, and its bytes as they are stored."""

    name: str
    size: int


class Parent(Answer):
    """What a record was forked from."""

    id: str
    version: int


class Overview(Answer):
    """A record at a version; `newest` is its present one.

    `left_out` are the largest of the fields that did not fit, `left_out_count` is of all of them. `earlier`: there are
    messages before those. `too_large` is the number of a message that did not fit alone, where the last of them is one.
    """

    id: str
    version: int
    newest: int
    user: str | None
    parent: Parent | None
    phase: str | None
    deleted: bool
    tags: Texts
    fields: Values
    bytes: Encoded | None = None
    left_out: list[LeftOut]
    left_out_count: int
    messages: Messages
    earlier: bool
    too_large: int | None


async def overview(scope: Scope, asked: Asked) -> Response:
    """A record, as far as it fits."""
    given = requests.query(asked.request, Looked)
    record = records.handle(asked, scope)
    context = context_of(record)
    page = Page(limit=given.limit, before=given.before, order="desc")
    if given.version is None:
        await records.look(record, scope, True)
    most = min(given.most, asked.limits.answer // 4)
    found = await inspection.overview(context, given.version, page, fields=most, said=most)
    return answer(_shown(context, found), version=found.entry.version)


def _shown(context: RecordContext, found: inspection.Overview) -> dict[str, Any]:
    entry = found.entry
    kept = entry.fields
    phase, owner = kept.get(PHASE), kept.get(OWNER)
    parent, _, version = kept.get(PARENT, b"").decode().rpartition("@")
    left = sorted(found.left_out.items(), key=lambda field: -field[1])[:_NAMED]
    return {
        "id": context.ref.id,
        "version": entry.version,
        "newest": found.newest,
        "user": None if not owner else unescape(owner.decode()),
        "parent": {"id": Ref.parse(parent).id, "version": int(version)} if parent else None,
        "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
        "deleted": entry.deleted,
        "tags": tags_in(kept),
        **bytes_as_text.apart(context.fields(entry)),
        "left_out": [{"name": name, "size": size} for name, size in left],
        "left_out_count": len(found.left_out),
        "messages": found.shown.raw(),
        "earlier": found.earlier,
        "too_large": found.too_large,
    }
