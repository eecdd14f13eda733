"""Finding records: by tags, and by an index of their contents.

A tag is a short text under a key, stored as one reserved field of the state. So each tag is set and removed by itself,
and histories, rollbacks and forks treat tags as fields. The name of the field holds everything: `##` and both texts,
escaped. Tags are not encrypted, because SQL compares them. An index receives each change at least once, and the changes
of a record in order.

Design: sections 9, 21.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from distributed_state.errors import InvalidValue
from distributed_state.values.model import TAG, escape, refuse_pair, unescape

Kind = Literal["message", "field", "item"]
KINDS: tuple[Kind, ...] = ("message", "field", "item")
Embed = Callable[[list[str]], Any]
"""Returns a vector for each text, or an awaitable of that."""


@dataclass(frozen=True, slots=True)
class SearchDocument:
    """Something that can be found: a message, a field or an item of a record, as of a version of it.

    `name` is the message's number, the field's name, or the item's key in its `collection`. A document replaces an
    earlier one with the same scope, id, kind, collection and name. `value` is the stored value, `text` its words. It is
    hidden from `ends` on, in seconds since 1970. `user` is the record's owner.
    """

    scope: str
    id: str
    kind: Kind
    collection: str
    name: str
    version: int
    text: str
    value: Any
    user: str | None = None
    ends: float | None = None


@dataclass(frozen=True, slots=True)
class SearchRemoval:
    """A message, field or item that a record no longer shows; without a kind, everything of the record."""

    scope: str
    id: str
    kind: Kind | None = None
    collection: str = ""
    name: str = ""


Row = SearchDocument | SearchRemoval


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """Which documents to find: those with all of these words, or any of them; without words, all.

    Limited to these scopes and kinds, to records whose ids start with a prefix, to a user and a collection. The most
    relevant come first; without words, the newest. `offset` skips the first ones, `limit` is the maximum number.
    """

    words: str
    match: Literal["all", "any"]
    scopes: tuple[str, ...]
    kinds: tuple[Kind, ...]
    prefix: str
    user: str | None
    collection: str | None
    limit: int
    offset: int


@dataclass(frozen=True, slots=True)
class SearchMatch:
    """A document that matches a query, and its score: a higher score is more relevant."""

    document: SearchDocument
    score: float


class SearchIndex(Protocol):
    """The interface of your own index outside the archive, such as OpenSearch or a vector database.

    Methods may be `async def`.

    One process at a time sends it the changes of a partition. If that process ends between two steps, rows come again,
    with the same or newer content. Store each under its scope, id, kind, collection and name.
    """

    def apply(self, rows: Sequence[Row]) -> Awaitable[None] | None:
        """Apply these rows in this order, and return when they are durable. After an error the rows come again."""
        ...

    def search(self, query: SearchQuery) -> Awaitable[Sequence[SearchMatch]] | Sequence[SearchMatch]:
        """Return matches, the most relevant first. If matches are filtered out later, a higher `offset` gets more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The options of search: `open(..., search=Search(...))`. All processes that use one archive need the same options.

    `language` is a text search configuration of PostgreSQL ("english", "german", ...), which reduces words to their
    stems; "simple" leaves them as they are, as SQLite always does. `embed` is a function that returns a vector of
    `dimensions` numbers for each text of a list; with it, a search also finds texts of the same meaning, which needs
    PostgreSQL with pgvector. If it is async, a search awaits it in the caller's event loop, and indexing in the loop of
    a thread of the store. Encrypted values are not indexed, unless `encrypted=True`: then the index has their words as
    plain text. `kinds` limits what is indexed. `index` is your own index instead of the database's.
    """

    language: str = "simple"
    embed: Embed | None = None
    dimensions: int | None = None
    encrypted: bool = False
    kinds: tuple[Kind, ...] = KINDS
    index: SearchIndex | None = None


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A search result.

    It belongs to the record `scope`, `id` of the user `user`, and is a message with its `number`, a field with its
    `key`, or an item with its `key` in its `collection`. `text` is the best matching part, `value` the whole value, as
    of the record's `version`. A higher score is more relevant, within one search; it is 0 where no words were given.
    """

    scope: str
    id: str
    user: str | None
    kind: Kind
    key: str | None
    collection: str | None
    number: int | None
    text: str
    value: Any
    version: int
    score: float


Filter = Mapping[str, Any]


# Tags


MOST = 256  # tags of one record; commit.lua has the same limit
KEY_BYTES = 64
TEXT_BYTES = 256


def tag_text(key: str, text: str) -> str:
    """A tag as one text, as in SQL. Raises InvalidValue if it cannot be a tag."""
    for what, given, most in ("key", key, KEY_BYTES), ("text", text, TEXT_BYTES):
        if not isinstance(given, str) or not given:
            raise InvalidValue(f"the {what} of a tag is a non-empty str, not {given!r:.80}")
        if len(given) > most or len(escape(given).encode()) > most:
            raise InvalidValue(f"the {what} of a tag takes at most {most} bytes when escaped: {given!r:.80}")
        refuse_pair(given, f"{what} of a tag")
    return f"{escape(key)}:{escape(text)}"


def tag_texts(given: Mapping[str, str | Iterable[str]], wanted_by: str) -> list[str]:
    """All of these tags; a key may have one text or several."""
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{wanted_by} takes texts by key, such as {{'run': 'r1'}}, not {given!r:.80}")
    found: list[str] = []
    for key, texts in given.items():
        if not isinstance(texts, (str, Iterable)):
            raise InvalidValue(f"{wanted_by} takes one text or several under {key!r:.80}, not {texts!r:.80}")
        found += [tag_text(key, text) for text in ([texts] if isinstance(texts, str) else texts)]
    return list(dict.fromkeys(found))


def tag_field(tag: str) -> bytes:
    """The name of the field that stores a tag."""
    return TAG + tag.encode()


def tag_of(name: bytes) -> str:
    """The tag that a field stores. Raises ValueError if its name is not one that this release writes."""
    tag = name[len(TAG) :].decode()
    key, _, text = tag.partition(":")
    try:
        if tag_text(unescape(key), unescape(text)) == tag:
            return tag
    except InvalidValue as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"{tag!r:.80} is not a tag")


def split_tag(name: bytes) -> tuple[str, str]:
    """Key and text of the tag that a field stores."""
    key, _, text = name[len(TAG) :].decode().partition(":")
    return unescape(key), unescape(text)


def tags_in(fields: Iterable[bytes]) -> dict[str, tuple[str, ...]]:
    """The tags among these fields, texts by key, both in order."""
    found: dict[str, list[str]] = {}
    for key, text in sorted(split_tag(name) for name in fields if name[: len(TAG)] == TAG):
        found.setdefault(key, []).append(text)
    return {key: tuple(texts) for key, texts in found.items()}
