"""How records are found: by tags, and by an index of what they say.

A tag is a short text under a key, and one reserved field of the state, so each is set and removed by itself, and a
history, a rollback or a fork has tags as it has fields. The name of the field says all: `##` and both texts, escaped.
Tags are not encrypted, because SQL compares them. An index receives each thing at least once, in a record's order.

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

    `name` is the message's number, the field's name, or the item's key in its `collection`. One with the same scope,
    id, kind, collection and name replaces it. `value` is what is stored there, `text` the words in it. It is shown no
    more from `ends` on, in seconds since 1970. `user` is whose record it is.
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
    """A message, field or item that a record shows no more; without a kind, all that it showed."""

    scope: str
    id: str
    kind: Kind | None = None
    collection: str = ""
    name: str = ""


Row = SearchDocument | SearchRemoval


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What is looked for: documents with all of these words, or any of them; without words, all.

    Of these scopes and kinds, of records whose ids begin with a prefix, of a user, of a collection, in this order:
    the most relevant first, without words the newest first. Those after the first `offset`, `limit` at most.
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
    """A document that fits a query, and how well: of two the one with the higher score is more relevant."""

    document: SearchDocument
    score: float


class SearchIndex(Protocol):
    """An index of the user's own, beside the archive: OpenSearch, a vector database. Methods may be `async def`.

    One process at a time tells it of a partition's records. Where that ends between two steps, rows come again, with
    the same content or a newer one: so each is put under its scope, id, kind, collection and name.
    """

    def apply(self, rows: Sequence[Row]) -> Awaitable[None] | None:
        """Take these, in this order, and return when they are kept. What is raised is tried again later."""
        ...

    def search(self, query: SearchQuery) -> Awaitable[Sequence[SearchMatch]] | Sequence[SearchMatch]:
        """What fits, the most relevant first. What is filtered out afterwards is asked for by a higher `offset`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How a store is searched: `open(..., search=Search(...))`. The same in all processes that name one archive.

    `language` is a text search configuration of PostgreSQL ("english", "german", ...), which reduces words to their
    stems; "simple" leaves them as they are, as SQLite always does. With `embed`, a function that returns a vector of
    `dimensions` numbers for each of some texts, what means the same is found: that needs PostgreSQL with pgvector.
    What is async is awaited in the caller's event loop for a search, and for indexing in one of a thread of the store's
    own. What is encrypted is in no index, unless `encrypted=True`: then its words stand there in plain text. `kinds`
    are what is found. `index` is one of your own, in place of the database's.
    """

    language: str = "simple"
    embed: Embed | None = None
    dimensions: int | None = None
    encrypted: bool = False
    kinds: tuple[Kind, ...] = KINDS
    index: SearchIndex | None = None


@dataclass(frozen=True, slots=True)
class SearchHit:
    """Something that was found.

    In the record `scope`, `id`, which is `user`'s: a message by its `number`, a field by its `key`, or an item by its
    `key` in its `collection`. `text` is the part of it that fits best, `value` all of it, as of the record's `version`.
    The higher of two scores of one search is the more relevant hit; 0 where no words were given.
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


@dataclass(frozen=True, slots=True)
class Indexed:
    """How far an index is: `behind` records of the namespace have changes that it lacks, of `records` in all."""

    records: int
    behind: int


Filter = Mapping[str, Any]


# Tags


MOST = 256  # of one record; commit.lua has the same
KEY_BYTES = 64
TEXT_BYTES = 256


def tag_text(key: str, text: str) -> str:
    """A tag as one text, as SQL has it. Raises InvalidValue for what cannot be one."""
    for what, given, most in ("key", key, KEY_BYTES), ("text", text, TEXT_BYTES):
        if not isinstance(given, str) or not given:
            raise InvalidValue(f"the {what} of a tag is a non-empty str, not {given!r:.80}")
        if len(given) > most or len(escape(given).encode()) > most:
            raise InvalidValue(f"the {what} of a tag takes at most {most} bytes when escaped: {given!r:.80}")
        refuse_pair(given, f"{what} of a tag")
    return f"{escape(key)}:{escape(text)}"


def tag_texts(given: Mapping[str, str | Iterable[str]], wanted_by: str) -> list[str]:
    """All of these tags; under a key stands one text or several."""
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{wanted_by} takes texts by key, as {{'run': 'r1'}}, not {given!r:.80}")
    found: list[str] = []
    for key, texts in given.items():
        if not isinstance(texts, (str, Iterable)):
            raise InvalidValue(f"{wanted_by} takes one text or several under {key!r:.80}, not {texts!r:.80}")
        found += [tag_text(key, text) for text in ([texts] if isinstance(texts, str) else texts)]
    return list(dict.fromkeys(found))


def tag_field(tag: str) -> bytes:
    """The field that stands for a tag."""
    return TAG + tag.encode()


def tag_of(name: bytes) -> str:
    """The tag that a field stands for. Raises ValueError if it is none that was written."""
    tag = name[len(TAG) :].decode()
    key, _, text = tag.partition(":")
    try:
        if tag_text(unescape(key), unescape(text)) == tag:
            return tag
    except InvalidValue as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"{tag!r:.80} is no tag")


def split_tag(name: bytes) -> tuple[str, str]:
    """Key and text of the tag that a field stands for."""
    key, _, text = name[len(TAG) :].decode().partition(":")
    return unescape(key), unescape(text)


def tags_in(fields: Iterable[bytes]) -> dict[str, tuple[str, ...]]:
    """The tags among these fields, texts by key, both in order."""
    found: dict[str, list[str]] = {}
    for key, text in sorted(split_tag(name) for name in fields if name[: len(TAG)] == TAG):
        found.setdefault(key, []).append(text)
    return {key: tuple(texts) for key, texts in found.items()}
