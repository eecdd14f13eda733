"""Answers a search. Law: a user can neither see nor count documents that the policy denies.

Design: section 21.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from distributed_state.cold.search_store import Row
from distributed_state.errors import AccessDenied, ConfigurationError, InvalidValue, TooLarge
from distributed_state.records.access import ITEMS, MESSAGES
from distributed_state.records.context import StoreContext
from distributed_state.search.follower import Follower, Setting, call_user, embedded, shortened, text_of
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec
from distributed_state.values.model import MAX_ID_BYTES, SCOPES, Ref, escape, unescape
from distributed_state.values.search import KINDS, SearchDocument, SearchHit, SearchMatch, SearchQuery

_MOST_WORDS = 64
_MOST_LOOKED_AT = 10_000
_MOST_BYTES = 32 * 2**20  # of the values of all hits, which are in memory more than once
_PAGE, _LARGEST_PAGE = 100, 5_000
_TOGETHER = 200  # hits that are examined before other tasks of the event loop get a turn
_SNIPPET = 240
_LOOKED_THROUGH = 20_000  # characters of a text that are searched for the snippet
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def follower_of(tiers: Tiers) -> Follower:
    """The job that indexes the archive in this store."""
    return next(each for each in tiers.workers if isinstance(each, Follower))


def checked(
    words: str,
    match: str,
    scope: str | None,
    kinds: Sequence[str],
    prefix: str,
    user: str | None,
    collection: str | None,
    limit: int,
    offset: int,
) -> SearchQuery:
    """Return the query with checked arguments. Raises InvalidValue."""
    if not isinstance(words, str) or len(words.split()) > _MOST_WORDS or len(words) > 4 * 1024:
        raise InvalidValue(f"query is a text of at most {_MOST_WORDS} words and 4096 characters")
    if match not in ("all", "any"):
        raise InvalidValue(f"match is 'all' or 'any', not {match!r:.80}")
    if type(limit) is not int or not 1 <= limit <= 1000:
        raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r:.80}")
    if type(offset) is not int or not 0 <= offset <= _MOST_LOOKED_AT:
        raise InvalidValue(f"offset is an int from 0 to {_MOST_LOOKED_AT}, not {offset!r:.80}")
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise InvalidValue(f"kinds are some of {', '.join(KINDS)}, not {kinds!r:.80}")
    if not isinstance(prefix, str) or len(prefix) > MAX_ID_BYTES:
        raise InvalidValue(f"a prefix is a str of at most {MAX_ID_BYTES} characters, not {prefix!r:.80}")
    if collection is not None and not isinstance(collection, str):
        raise InvalidValue(f"collection is a str or None, not {collection!r:.80}")
    scopes = SCOPES if scope is None else (Ref(scope, "any").scope,)
    owner = None if user is None else Ref("user", user).id
    # An index cannot find a word without a letter or a digit.
    words = " ".join(word for word in shortened(words).split() if any(map(str.isalnum, word)))
    asked = tuple(kind for kind in KINDS if kind in kinds)
    return SearchQuery(words, match, tuple(scopes), asked, prefix, owner, collection, limit, offset)  # type: ignore[arg-type]  # looked at above


async def search(
    store: StoreContext, setting: Setting, query: SearchQuery, filter: Mapping[str, Any] | None, *, said: bool
) -> list[SearchHit]:
    """The `limit` hits after the first `offset`. `said`: the user gave words, even if none of them counts."""
    if said and not query.words:
        return []
    tiers = store.tiers()
    fits = _filter(filter)
    while (found := await _found(store, setting, query, fits)) is None:
        setting.look_again()
        await setting.require(tiers.port, tiers.cold.search)
    return found


async def _found(
    store: StoreContext, setting: Setting, query: SearchQuery, fits: Callable[[Any], bool]
) -> list[SearchHit] | None:
    """Like `search`; None: the index was removed or rebuilt after the store last read its settings."""
    # If a policy restricts reading, scores must not reveal hidden documents either.
    ask = await _asking(store.tiers(), setting, query, store.guard is not None)
    hits: list[SearchHit] = []
    at, left, size = 0, query.offset, 0
    asked = max(_PAGE, query.limit)
    while len(hits) < query.limit and at < _MOST_LOOKED_AT:
        page = await ask(replace(query, offset=at, limit=asked))
        # Pages grow, because each one searches the whole index again: a filter without matches caused a hundred
        # searches.
        asked = min(_LARGEST_PAGE, 4 * asked)
        if page is None:
            return None
        for number, (found, length) in enumerate(page.matches):
            if number % _TOGETHER == 0:
                await store.tiers().port.sleep(0)  # lets other tasks run: thousands of hits would block the event loop
            # The filter comes first, because it is cheaper than asking the policy.
            if len(hits) < query.limit and fits(found.document.value) and _is_shown(store, found.document):
                if left:
                    left -= 1
                    continue
                size += length
                if size > _MOST_BYTES:
                    raise TooLarge(f"the first {len(hits) + 1} hits are {size} bytes, more than {_MOST_BYTES}")
                hits.append(_hit(found, query.words))
        if not page.more:
            break
        at += page.taken
    return hits


class _Page(NamedTuple):
    """Matches, each with the size of its value in bytes (0 if unknown), in the order of the index."""

    matches: list[tuple[SearchMatch, int]]
    taken: int
    more: bool


async def _asking(
    tiers: Tiers, setting: Setting, query: SearchQuery, apart: bool
) -> Callable[[SearchQuery], Awaitable[_Page | None]]:
    """A function that returns a page of matches."""
    port = tiers.port

    async def elsewhere(page: SearchQuery) -> _Page:
        assert setting.search.index is not None
        found = await call_user(port, "index.search", setting.search.index.search, page)
        if not isinstance(found, Sequence) or not all(isinstance(each, SearchMatch) for each in found):
            raise ConfigurationError(f"search: `index.search` returned {found!r:.80}, not a list of SearchMatch")
        return _Page([(each, 0) for each in found], len(found), len(found) >= page.limit)

    if setting.search.index is not None:
        return elsewhere
    vector = None
    if setting.search.embed is not None and query.words:
        (vector,) = await embedded(port, setting, [query.words])
    await tiers.clock.know()
    now_ms = int(tiers.clock.now() * 1000)

    def read(page: SearchQuery) -> _Page | None:
        how = (setting.search.language, vector, setting.search.dimensions or 0, setting.stored, apart)
        found = tiers.cold.search.search(page, now_ms, *how)
        if found is None:
            return None
        matches = [(SearchMatch(_document(row), row.score), len(row.value)) for row in found.rows]
        return _Page(matches, found.taken, found.more)

    # Rows are decoded in the same thread: megabytes of JSON would block the event loop.
    return partial(port.sql, read)


def _document(row: Row) -> SearchDocument:
    ref = Ref.parse(row.record)
    value = codec.decode(row.value)
    return SearchDocument(
        scope=ref.scope,
        id=ref.id,
        kind=row.kind,  # type: ignore[arg-type]  # the table holds no others
        collection=codec.decode_key(row.collection),
        name=codec.decode_key(row.name),
        version=row.version,
        text=row.text or text_of(row.kind, value),
        value=value,
        user=None if row.owner is None else unescape(row.owner),
    )


def _is_shown(store: StoreContext, found: SearchDocument) -> bool:
    """Whether the policy allows reading this document: messages, a field by its name, or items."""
    if store.guard is None:
        return True
    fields = {"message": MESSAGES, "field": found.name, "item": ITEMS}
    try:
        owner = None if found.user is None else escape(found.user)
        store.allow("read", Ref(found.scope, found.id), field=fields[found.kind], user=owner)
    except AccessDenied:
        return False
    return True


def row_shown(row: Row, words: str) -> SearchHit:
    """A row of the index as a hit of a query with these words."""
    return _hit(SearchMatch(_document(row), row.score), words)


def _hit(found: SearchMatch, words: str) -> SearchHit:
    one = found.document
    return SearchHit(
        scope=one.scope,
        id=one.id,
        user=one.user,
        kind=one.kind,
        key=None if one.kind == "message" else one.name,
        collection=one.collection if one.kind == "item" else None,
        number=int(one.name) if one.kind == "message" else None,
        text=snippet(one.text, words),
        value=one.value,
        version=one.version,
        score=found.score,
    )


def snippet(text: str, words: str) -> str:
    """The part of a text where one of these words first occurs, at most 240 characters.

    Only the beginning of a long text is searched, and it is shown if no word is found: searching 100 hits of 200 KB for
    64 words took seconds.
    """
    if len(text) <= _SNIPPET:
        return text
    lower = text[:_LOOKED_THROUGH].lower()
    first = len(lower)
    for word in words.lower().split():
        at = lower.find(word.strip("\"'.,;:!?()"), 0, first)
        first = at if at >= 0 else first
    start = max(0, (first if first < len(lower) else 0) - _SNIPPET // 3)
    if start:
        start = text.find(" ", start, start + 40) + 1 or start
    part = text[start : start + _SNIPPET]
    return ("..." if start else "") + part.strip() + ("..." if start + _SNIPPET < len(text) else "")


def _filter(filter: Mapping[str, Any] | None) -> Callable[[Any], bool]:
    """A test whether a value is an object with these values. Raises InvalidValue for an unknown comparison."""
    tests: list[tuple[str, Callable[[Any, Any], bool], Any]] = []
    for name, wanted in (filter or {}).items():
        if isinstance(wanted, Mapping) and wanted and all(isinstance(how, str) and how[:1] == "$" for how in wanted):
            for how, value in wanted.items():
                if how not in _COMPARED:
                    raise InvalidValue(f"filter: {how!r:.80} is not one of {', '.join(_COMPARED)}")
                tests.append((name, _COMPARED[how], value))
        else:
            tests.append((name, operator.eq, wanted))

    def fits(value: Any) -> bool:
        if not tests:
            return True
        if not isinstance(value, dict):
            return False
        try:
            return all(
                (name in value or test is operator.ne) and test(value.get(name), other) for name, test, other in tests
            )
        except TypeError:
            return False  # a number is neither less nor more than a text

    return fits
