"""Tags of a record: short texts under a key, by which records are found. Law: each is one reserved field of the state.

So each is set and removed by itself, whoever changes the others, and a history, a rollback or a fork has them as it has
fields. The name of the field says all: `##` and both texts, escaped. They are never encrypted, as they are looked up.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distributed_state.errors import InvalidValue
from distributed_state.values.model import TAG, escape, refuse_pair, unescape

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
