"""A view of a remote record that collects changes. Law: it holds only for the version that it saw.

Design: section 26.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from types import TracebackType
from typing import Any, Never

from distributed_state.errors import InvalidValue
from distributed_state.remote import values
from distributed_state.remote.requests import RecordPlace, State
from distributed_state.values import codec
from distributed_state.values.items import DeleteItem, PutItem
from distributed_state.values.model import Message

_GONE: Any = object()


class RemoteTransaction(MutableMapping[str, Any]):
    """The record's fields as a dict. What is changed here is one commit at the end, or nothing.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._now: dict[str, Any] = {}
        self._more: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self._tags: dict[tuple[str, str], str] = {}  # what becomes of a tag: "tag" or "untag"
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        self._set: set[str] = set()
        self._over = False

    @property
    def version(self) -> int:
        """The version that this view shows, and that the commit expects."""
        return self._state.version

    @property
    def phase(self) -> str | None:
        """The phase before this transaction."""
        return self._state.phase

    def __getitem__(self, key: str) -> Any:
        if key not in self._now:
            codec.encode_key(key)
            # A copy, so that a change in place is seen at the end. KeyError if it is not there.
            self._now[key] = copy.deepcopy(self._state.fields[key])
        found = self._now[key]
        if found is _GONE:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        self._open()
        values.fields({key: value})
        self._now[key] = value
        self._set.add(key)

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is not there
        self._open()
        self._now[key] = _GONE

    def __iter__(self) -> Iterator[str]:
        keys = dict.fromkeys([*self._state.fields, *self._now])
        yield from (key for key in keys if self._now.get(key) is not _GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this commit."""
        self._open()
        self._messages += values.messages(messages)

    def tag(self, key: str, *texts: str) -> None:
        """Tag the record with one text or several under a key, with this commit."""
        self._open()
        self._add("tag", key, texts)

    def untag(self, key: str, *texts: str) -> None:
        """Take tags away with this commit."""
        self._open()
        self._add("untag", key, texts)

    def _add(self, what: str, key: str, texts: tuple[str, ...]) -> None:
        values.tags({key: texts}, None)
        self._tags.update(dict.fromkeys(((key, text) for text in texts), what))

    def put_item(
        self,
        collection: str,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        keep: bool = False,
        **others: Never,
    ) -> None:
        """Put an item of the record with this commit. `keep` leaves one that is there then as it is."""
        values.refuse_options("put_item", others)
        self._change(PutItem(
            collection=collection, key=key, value=value, if_absent=if_absent, if_present=if_present, keep=keep
        ))  # fmt: skip

    def delete_item(self, collection: str, key: str, *, if_present: bool = False, **others: Never) -> None:
        """Delete an item of the record with this commit; one that is not there is no error, unless it must be."""
        values.refuse_options("delete_item", others)
        self._change(DeleteItem(collection=collection, key=key, if_present=if_present))

    def _change(self, item: PutItem | DeleteItem) -> None:
        self._open()
        self._items[item.collection, item.key] = values.items([item])[0]

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this commit."""
        self._open()
        self._more["phase"] = phase

    def body(self) -> dict[str, Any] | None:
        """End it: the change as a request has it, None if there is none."""
        self._over = True
        before = self._state.fields
        put = {key: value for key, value in self._now.items() if value is not _GONE and self._changed(key, value)}
        gone = [key for key, value in self._now.items() if value is _GONE and key in before]
        body = {**self._more, **values.fields(put)}
        for (key, text), what in self._tags.items():
            body.setdefault(what, {}).setdefault(key, []).append(text)
        body |= {"delete": gone} if gone else {}
        body |= {"append": self._messages} if self._messages else {}
        body |= {"items": [*self._items.values()]} if self._items else {}
        return {**body, "kind": "transaction"} if body else None

    def _changed(self, key: str, value: Any) -> bool:
        before = self._state.fields.get(key, _GONE)
        return key in self._set or before is _GONE or codec.encode_value(value, key) != codec.encode_value(before, key)

    def _open(self) -> None:
        if self._over:
            raise InvalidValue("this transaction is over; nothing can be changed through it any more")


class AsyncRemoteTransactionBody:
    """The `async with` around a RemoteTransaction."""

    def __init__(self, place: RecordPlace, durability: str | None = None) -> None:
        self._place = place
        self._durability = durability

    async def __aenter__(self) -> RemoteTransaction:
        self._view = RemoteTransaction(await self._place.state(fresh=True))
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await commit(self._place, self._view, self._durability)


async def commit(place: RecordPlace, view: RemoteTransaction, durability: str | None) -> None:
    """Write what was changed, for the version that was seen. Raises Conflict."""
    body = view.body()
    if body is not None:
        await place.write(body, durability, expect_version=view.version)
