"""What of a record is found, and by which words. Law: what is encrypted has no words, unless it was asked for.

Design: section 21.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from distributed_state.cold.search_index import Due, Name, Piece, Stored
from distributed_state.errors import CorruptState
from distributed_state.values import codec as codecs
from distributed_state.values import field_ttl
from distributed_state.values.codec import MESSAGE, SEALED, Codec
from distributed_state.values.model import Ref, unescape
from distributed_state.values.search import Kind, SearchDocument, SearchRemoval

_LONGEST = 200_000  # bytes of a text that are indexed; PostgreSQL takes a megabyte of what it makes of them


class Translator:
    """Makes documents of what a store keeps."""

    def __init__(self, codec_of: Callable[[str], Codec], kinds: tuple[Kind, ...], *, encrypted: bool) -> None:
        self._codec_of = codec_of
        self._kinds = kinds
        self._encrypted = encrypted

    def stored(self, piece: Piece, version: int) -> Stored | None:
        """The document, None if it is not to be found."""
        kind = piece.name[0]
        data = piece.data
        if not data or kind not in self._kinds:
            return None
        ends, frame = field_ttl.split(data)
        sealed_as = _sealed_as(piece.name)
        codec = self._codec_of(piece.source)
        if not self._encrypted and (frame[:1] == SEALED or codec.covers(sealed_as)):
            return None
        try:
            json_text = codec.open(data, sealed_as)
            value = codecs.decode(json_text)
        except CorruptState:
            return None  # or under a key that is not here: who reads it is told
        text = text_of(kind, value)
        if not text:
            return None
        # Before a message the same mark says when it was committed.
        ends_ms = None if kind == "message" or ends == field_ttl.NEVER else int(ends * 1000)
        digest = hashlib.blake2b(b"%a %b %b" % (ends_ms, text.encode(), json_text), digest_size=12).digest()
        return Stored(piece.name, version, ends_ms, digest, text, json_text)


def _sealed_as(name: Name) -> str:
    kind, collection, key = name
    if kind == "message":
        return MESSAGE
    return codecs.item_name(collection + b"\0" + key) if kind == "item" else codecs.decode_key(key)


def text_of(kind: str, value: Any) -> str:
    """The words by which a message, a field or an item is found."""
    return shortened(said(value) if kind == "message" else words_of(value))


def words_of(value: Any) -> str:
    """What a JSON value says: its texts and numbers, a line each, without the names in it."""
    return "\n".join(_leaves(value))


def _leaves(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)


def said(message: Any) -> str:
    """The text of a message, without what is called or shown in it."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def shortened(text: str) -> str:
    """The text as any index takes it: without NUL and lone surrogates, and not longer than any can hold."""
    return text.replace("\0", " ").encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore").strip()


def document(one: Due, stored: Stored) -> SearchDocument:
    """A document for an index of the user's own."""
    ref = Ref.parse(one.record)
    kind, collection, name = stored.name
    return SearchDocument(
        scope=ref.scope,
        id=ref.id,
        kind=kind,  # type: ignore[arg-type]  # the tables hold no others
        collection=codecs.decode_key(collection),
        name=codecs.decode_key(name),
        version=stored.version,
        text=stored.text,
        value=codecs.decode(stored.value),
        user=None if one.owner is None else unescape(one.owner),
        ends=None if stored.ends_ms is None else stored.ends_ms / 1000,
    )


def removed(record: str, name: Name | None = None) -> SearchRemoval:
    """That a record shows something no more, or nothing at all."""
    ref = Ref.parse(record)
    if name is None:
        return SearchRemoval(ref.scope, ref.id)
    kind, collection, key = name
    names = (codecs.decode_key(collection), codecs.decode_key(key))
    return SearchRemoval(ref.scope, ref.id, kind, *names)  # type: ignore[arg-type]  # the tables hold no others
