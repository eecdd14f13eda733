"""The tokens of sessions by day and model. Law: each turn counts once, in the transaction that archives it.

Design: section 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from sqlalchemy import Row, Select, func, select

from distributed_state.cold import listings, record_index
from distributed_state.cold.engine import Sql
from distributed_state.cold.record_index import Parsed
from distributed_state.cold.tables import records, usage
from distributed_state.cold.values import Wanted
from distributed_state.values.usage import Tokens, Usage

DAY_MS = 86_400_000
_SUMS = (usage.c.calls, usage.c.input_tokens, usage.c.output_tokens)


def note(sql: Sql, parsed: Iterable[Parsed], keys: Mapping[str, int]) -> None:
    """Add the tokens of these turns. The rows of their records are locked, so that no other transaction adds, too."""
    add(sql, ((keys[each.entry.record], each.entry.time_ms, dict(each.usage)) for each in parsed if each.usage))


def add(sql: Sql, used: Iterable[tuple[int, int, Mapping[str, Tokens]]]) -> None:
    """Add tokens: of a record's key, at a time in ms, by model."""
    more: dict[tuple[int, int, str], Tokens] = {}
    for key, time_ms, models in used:
        for model, tokens in models.items():
            place = key, time_ms // DAY_MS, model
            more[place] = more.get(place, Tokens()) + tokens
    if not more:
        return
    c = usage.c
    there = sql.rows(select(c.record, c.day, c.model, *_SUMS), c.record, {key for key, _, _ in more})
    known = {(row.record, row.day, row.model): _tokens(row) for row in there}
    sums = {place: known.get(place, Tokens()) + tokens for place, tokens in sorted(more.items())}
    rows = [(*place, each.calls, each.input_tokens, each.output_tokens) for place, each in sums.items()]
    sql.put(usage, rows)


def total(sql: Sql, wanted: Wanted, since_ms: int, unarchived: Sequence[Parsed] = ()) -> Usage:
    """The usage of these sessions since the day of this time, with that of entries that SQL does not have yet."""
    since = since_ms // DAY_MS
    found: dict[int, dict[str, Tokens]] = {}
    for row in sql.execute(_summed(sql, wanted, since)):
        found.setdefault(row.day, {})[row.model] = _tokens(row)
    late, existing = listings.lacking(sql, [each for each in unarchived if each.usage])
    owners = {record: head["owner"] for record, head in record_index.heads(sql, late, existing).items()}
    for each in late:
        day = each.entry.time_ms // DAY_MS
        if day >= since and (wanted.owner is None or owners[each.entry.record] == wanted.owner):
            models = found.setdefault(day, {})
            for model, tokens in each.usage:
                models[model] = models.get(model, Tokens()) + tokens
    days = {_date(day): Usage.of(models) for day, models in sorted(found.items())}
    names = sorted({model for models in found.values() for model in models})
    sums = {name: sum((each.get(name, Tokens()) for each in found.values()), Tokens()) for name in names}
    return Usage.of(sums, days)


def _summed(sql: Sql, wanted: Wanted, since: int) -> Select[tuple[int, str, int, int, int]]:
    r, c = records.c, usage.c
    mine = [r.namespace == sql.namespace, r.record >= wanted.text, r.record < listings.end(wanted.text)]
    if wanted.owner is not None:
        mine.append(r.owner == wanted.owner)
    sums = [func.sum(each).label(each.name) for each in _SUMS]
    query = select(c.day, c.model, *sums).join_from(usage, records, c.record == r.key)
    return query.where(*mine, c.day >= since).group_by(c.day, c.model)


def _tokens(row: Row[tuple[int, str, int, int, int]]) -> Tokens:
    return Tokens(int(row.calls), int(row.input_tokens), int(row.output_tokens))


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat()
