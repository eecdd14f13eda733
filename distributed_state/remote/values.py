"""Converts values to request bodies and answers to values, and names the methods that a remote store lacks.

Law: a value is read back as it was written. Values that the direct store refuses are refused here, by the same check,
before anything is sent. A method that a remote store lacks raises an error with an alternative.

Design: section 26.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from distributed_state.conversation.output import PART_NAMES
from distributed_state.errors import ConfigurationError, InvalidValue
from distributed_state.results import (
    Ask,
    Branch,
    Change,
    Checkpoint,
    Chunk,
    Ended,
    Event,
    HeldLease,
    Input,
    Lifetime,
    Notice,
    OutputPart,
    Replica,
    SessionInfo,
    Snapshot,
    StopRequested,
    TimedRun,
    Tokens,
    TurnTimes,
    Usage,
    Waiter,
)
from distributed_state.values import as_text, codec, field_ttl
from distributed_state.values.items import ANY, DeleteItem, Item, PutItem, encode_collection, encode_item_key
from distributed_state.values.levels import check_staleness
from distributed_state.values.model import ABSENT, Message, Presence, Ref
from distributed_state.values.search import SearchHit, tag_texts

T = TypeVar(
    "T",
    Ask,
    Branch,
    Checkpoint,
    HeldLease,
    Lifetime,
    Replica,
    SearchHit,
    SessionInfo,
    TimedRun,
    Tokens,
    TurnTimes,
    Waiter,
)


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parts `set` and `bytes` of a body. Raises InvalidValue."""
    if not isinstance(values, Mapping):
        raise InvalidValue(f"fields must come as a mapping, not as {type(values).__name__}")
    for key, value in values.items():
        codec.encode_key(key)
        codec.encode_value(value, key)
    found = as_text.apart(values)
    body: dict[str, Any] = {"set": found["fields"]} if found["fields"] else {}
    return body | ({"bytes": found["bytes"]} if "bytes" in found else {})


def expectations(expect: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of a body for `expect`. Raises InvalidValue."""
    body: dict[str, Any] = {}
    for key, value in (expect or {}).items():
        codec.encode_key(key)
        if isinstance(value, Presence):
            body.setdefault("expect_absent" if value is ABSENT else "expect_present", []).append(key)
        elif isinstance(value, bytes):
            raise InvalidValue(f"{key!r:.80}: a remote store cannot compare bytes; use expect_version")
        else:
            codec.encode(value, key)
            body.setdefault("expect", {})[key] = value
    return body


def must_ask(fresh: bool, max_staleness: float | None) -> bool:
    """Whether the service must ask Redis. Raises InvalidValue."""
    if max_staleness is not None:
        check_staleness(max_staleness)
    return fresh or max_staleness is not None


def lasting(body: dict[str, Any], ttl: float | None) -> dict[str, Any]:
    """A body whose fields expire after this many seconds. Raises InvalidValue."""
    if ttl is None:
        return body
    field_ttl.after(ttl, 0.0)
    return body | {"ttl": ttl}


def conditions(expect_version: int | None, expect_exists: bool | None = None) -> dict[str, str]:
    """The headers with the record's expected version. Raises InvalidValue."""
    if expect_version is not None:
        if type(expect_version) is not int or expect_version < 0:
            raise InvalidValue(f"expect_version is an int from 0 on, not {expect_version!r}")
        if expect_exists is not None:
            raise InvalidValue("a remote store takes expect_version or expect_exists, not both")
        return {"If-Match": f'"{expect_version}"'}
    if expect_exists is None:
        return {}
    return {"If-Match": "*"} if expect_exists else {"If-None-Match": "*"}


def messages(given: Iterable[Message | dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a body. Raises InvalidValue."""
    found = []
    for each in given:
        fields = (each if isinstance(each, Message) else codec.as_message(each)).to_dict()
        codec.encode(fields, "message")
        found.append(fields)
    return found


def items(given: Iterable[PutItem | DeleteItem]) -> list[dict[str, Any]]:
    """Changes of items for a body. Raises InvalidValue, and ConfigurationError for `equals`."""
    found = []
    for each in given:
        if not isinstance(each, PutItem | DeleteItem):
            raise InvalidValue(f"items takes PutItem and DeleteItem, not {type(each).__name__}")
        if each.equals is not ANY:
            refuse_options("an item", ["equals"])
        encode_collection(each.collection)
        encode_item_key(each.key)
        body: dict[str, Any] = {"collection": each.collection, "key": each.key}
        expected = [name for name in ("absent", "present") if getattr(each, f"if_{name}", False)]
        if len(expected) > 1:
            raise InvalidValue("give if_absent or if_present, not both")
        if expected:
            body["expect"] = expected[0]
        if isinstance(each, DeleteItem):
            body["delete"] = True
        else:
            codec.encode_value(each.value, each.key)
            is_bytes = isinstance(each.value, bytes)
            body |= {"bytes": as_text.text_of(each.value)} if is_bytes else {"value": each.value}
            body |= {"keep": True} if each.keep else {}
        found.append(body)
    return found


def tags(tag: Mapping[str, str | Iterable[str]] | None, untag: Mapping[str, str | Iterable[str]] | None) -> Any:
    """`tag` and `untag` of a body. Raises InvalidValue."""
    body: dict[str, dict[str, list[str]]] = {}
    for name, given in ("tag", tag), ("untag", untag):
        tag_texts(given or {}, name)
        if given:
            body[name] = {key: [texts] if isinstance(texts, str) else [*texts] for key, texts in given.items()}
    return body


# Answers


def made(kind: type[T], found: Mapping[str, Any]) -> T:
    """Make a value of a class of the package from an answer, which may have more or fewer fields in another release."""
    absent = dataclasses.MISSING
    names = [each.name for each in dataclasses.fields(kind) if each.name in found or each.default is absent]
    return kind(**{name: found[name] for name in names})


def held_lease(found: Mapping[str, Any]) -> HeldLease:
    """A held lease, with its waiters."""
    return made(HeldLease, {**found, "waiters": tuple(made(Waiter, each) for each in found["waiters"])})


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an answer, including those that are bytes."""
    return as_text.together(found["fields"], found.get("bytes") or {})


def value(found: Mapping[str, Any], name: str) -> Any:
    """A value of an answer, which has `value` or `bytes`."""
    return as_text.bytes_of(found["bytes"], name) if found.get("bytes") is not None else found.get("value")


def message(fields: dict[str, Any], number: int | None, time: float | None) -> Message:
    """A message that was read: its content, number and commit time."""
    return Message.unread(lambda data, number: (fields, time), [b""], [number])[0].looked_at()


def _numbered(found: Mapping[str, Any]) -> Message:
    fields = dict(found)
    return message(fields, fields.pop("number", None), None)


def snapshot(found: Mapping[str, Any]) -> Snapshot:
    """A record at a version."""
    return Snapshot(
        version=found["version"], fields=shown(found), messages=tuple(map(_numbered, found["messages"])),
        phase=found["phase"], deleted=found["deleted"],
        tags={key: tuple(texts) for key, texts in found["tags"].items()},
    )  # fmt: skip


def change(found: Mapping[str, Any], ref: Ref) -> Change:
    """An entry of a history."""
    items = {
        (each["collection"], each["key"]): None
        if each["deleted"]
        else Item(each["collection"], each["key"], value(each, each["key"]), found["version"], ref.text, "")
        for each in found["items"]
    }
    return Change(
        version=found["version"], time=found["time"], kind=found["kind"], actor=found["actor"], token=found["token"],
        set=shown(found), deleted=tuple(found["deleted"]), appended=tuple(map(_numbered, found["messages"])),
        phase=found["phase"], label=found["label"], items=items, tagged=_pairs(found["tagged"]),
        untagged=_pairs(found["untagged"]), replica=found.get("replica", ""), times=_times(found.get("times")),
        usage=None if found.get("usage") is None else usage(found["usage"]),
        cleared=tuple(found.get("cleared", ())), kept=_runs(found.get("kept")), restored=found.get("restored"),
        from_version=found.get("from_version"),
    )  # fmt: skip


def _runs(found: Iterable[Iterable[int | None]] | None) -> tuple[tuple[int, int | None], ...] | None:
    return None if found is None else tuple((first or 0, last) for first, last in found)


def _times(found: Mapping[str, Any] | None) -> TurnTimes | None:
    """The times of a turn, None from a service of an earlier release."""
    if not found:
        return None
    return made(TurnTimes, {**found, "runs": tuple(made(TimedRun, each) for each in found["runs"])})


def usage(found: Mapping[str, Any]) -> Usage:
    """Tokens of models, and with `days` those of each day."""
    models = {name: made(Tokens, each) for name, each in found["models"].items()}
    return Usage.of(models, {day: usage(each) for day, each in found.get("days", {}).items()})


def _pairs(found: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((key, text) for key, text in found)


def branch(found: Mapping[str, Any]) -> Branch:
    """A branch of a record."""
    missing = tuple((first, last) for first, last in found["missing"])
    return made(Branch, {**found, "missing": missing, "actors": tuple(found["actors"])})


def event(found: Mapping[str, Any]) -> Event:
    """An event, from its CloudEvents attributes."""
    return Event(
        id=found["id"], type=found["type"], subject=found.get("subject", ""),
        time=datetime.fromisoformat(found["time"]).timestamp(), data=found["data"], source=found["source"],
        sequence=found["sequence"], epoch=found["epoch"], partition=found["partition"], version=found["version"],
        actor=found["actor"],
    )  # fmt: skip


def part(name: str, position: str, found: Mapping[str, Any]) -> OutputPart:
    """A part of the output of turns."""
    kind = _PARTS.get(name)
    if kind is Chunk:
        return Chunk(position, chunk(found))
    if kind is StopRequested:
        return StopRequested(position, found["reason"])
    if kind is Ended:
        return Ended(position, found["version"], found["outcome"])
    return Notice(position, name, dict(found)) if kind is None else kind(position)


def chunk(found: Mapping[str, Any]) -> Any:
    """A chunk of the output."""
    return as_text.bytes_of(found["bytes"], "bytes") if "bytes" in found else found["value"]


def chunk_body(given: Any) -> dict[str, Any]:
    """A chunk for a body. Raises InvalidValue."""
    if isinstance(given, bytes):
        return {"bytes": as_text.text_of(given)}
    codec.encode(given, "chunk")
    return {"value": given}


def waiting(found: Mapping[str, Any]) -> Input:
    """An input of the inbox."""
    given = message(found["message"], None, None)
    return Input(found["number"], given, found["request_id"], found["time"], found["wake"], found["every"])


def ask(found: Mapping[str, Any]) -> Ask:
    """An open question to a person."""
    return made(Ask, {**found, "session": found["conversation"]})


_PARTS: dict[str, Any] = {name: kind for kind, name in PART_NAMES.items()}
_DIRECT = "open the store by its Redis URL for that"
INSTEAD = {
    "acting_as": "history shows whose the token is",
    "blocking": "open a StateStore at the same URL",
    "create": "use write(set=..., expect_exists=False)",
    "durable": "give durability= with the write",
    "find_many": "read a page with list(), or one by one with find()",
    "get_many": "read a page with list(), or one by one with get()",
    "initialize": "use write(set=..., expect={...: ABSENT})",
    "invalidate": "nothing is cached, each read is a request",
    "off": "use events()",
    "on": "use events()",
    "put_missing": "put each with if_absent=True, or use write(items=[PutItem(..., keep=True)])",
    "settings": "they are the service's",
    "view": "read get_all(), or use a transaction",
}
"""Advice for a name that only the direct store has.

For names that are not listed, the advice is to use the direct store."""
OPTIONS = {
    "merge": "without it the function runs again on the newest state",
    "advisory": "without it others' writes are refused, too",
    "equals": "no value can be expected of an item there: use if_absent= or if_present=, or lock()",
    "schema": "read and write fields, and validate them by your model",
    "actor": "history shows whose the token is",
    "idle": "use set_lifetime()",
    "lifetime": "use set_lifetime()",
    "on_invalid": _DIRECT,
    "clean": "clean values before they are given, or where the service opens its store",
    "clean_messages": "clean messages before they are given, or where the service opens its store",
    "durability": "give it with a write that takes it, as set() or write()",
    "expect": "look at what the turn shows, and raise",
    "expect_exists": "look at turn.version, and raise",
    "limit": "raise when its time is over",
    "slot": "give a request_id",
    "take_over": "PUT /v1/conversations/{id}/lease/{token}, or " + _DIRECT,
    "prefix": "choose among what it returns",
    "group": "keep the position, and give it as since=",
    "progress": _DIRECT,
}
"""Advice for options that only the direct store has, of methods that exist here."""


def refuse_options(method: str, given: Iterable[str]) -> None:
    """Raise ConfigurationError for an option that only the direct store has, TypeError for an unknown one."""
    for name in given:
        if name not in OPTIONS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        raise ConfigurationError(f"{name}= of {method}() is not available on a remote store: {OPTIONS[name]}")


def refuse(remote: object, name: str, direct: Callable[[], type]) -> Exception:
    """The error for a name that a remote object lacks; `direct` is the corresponding class of the direct store."""
    if name.startswith("_") or not hasattr(direct(), name):
        return AttributeError(f"{type(remote).__name__!r} object has no attribute {name!r}")
    return ConfigurationError(f"{name} is not available on a remote store: {INSTEAD.get(name, _DIRECT)}")
