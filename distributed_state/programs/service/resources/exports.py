"""Exports: a record with its whole history, as `import` reads it. Law: it is sent as it is read, lines at a time."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from distributed_state.port import waited
from distributed_state.programs.service.downloading import A_PAGE, Download
from distributed_state.programs.service.fairness import copying
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.routes import Asked
from distributed_state.records.context import context_of
from distributed_state.store.export import Export
from distributed_state.values.model import Scope


async def export(scope: Scope, asked: Asked) -> Response:
    """The record as JSON lines, to download."""
    record = records.handle(asked, scope)
    context = context_of(record)
    context.allow("admin", None)
    found = Export(context.tiers, context.keys)
    party = asked.caller.party
    with waited.queued():
        taken = await asked.budget.take(party, A_PAGE)
    try:
        async with copying(party):
            first = await found.begin()
    except BaseException:
        taken.give_back()
        raise
    count = partial(asked.rates.count, asked.caller)
    return Download(first, found, record.id, asked.limits, asked.budget, taken, count)
