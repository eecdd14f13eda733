"""Questions to people: a turn asks, and its session waits for the answer. Law: each question has one answer.

A question is a field of the session, in the phase "waiting_feedback". The answer is an input, whose request names the
question, so that only the first answer is accepted; the turn that takes it closes the question. A question that expires
has a wake. A question that was answered or has expired is not open, also if no turn has closed it yet.

Design: section 31.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributed_state.conversation import inbox, request_log
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.context import RecordContext
from distributed_state.results import Ask, Input
from distributed_state.tiers import read as read_path
from distributed_state.values import chance, codec

PHASE = "waiting_feedback"
FIELD = "ask."
_WAKE = "ask "
_MOST = 10  # open questions of a session that are listed
_BYTES = 16 * 1024  # of a question with its data
_ANSWERS = "answers"  # in an answer's metadata: the name of the question
_VALUE = "value"  # in an answer's metadata: the answer, if it is not a str


def field_of(name: str) -> str:
    """The field of the open question with this name. Raises InvalidValue."""
    if not isinstance(name, str) or len(name) > 100:
        raise InvalidValue(f"the name of a question is a str of at most 100 characters, not {name!r:.80}")
    return FIELD + name


def wake_of(name: str) -> str:
    """The name of the wake at which a question expires."""
    return _WAKE + name


def opened(question: str, data: Any, now: float, expires: float | None) -> dict[str, Any]:
    """The content of the field. Raises InvalidValue."""
    if not isinstance(question, str) or not question:
        raise InvalidValue(f"a question is a str that is not empty, not {question!r:.80}")
    if len(codec.encode([question, data], "data")) > _BYTES:
        raise InvalidValue(f"a question and its data have at most {_BYTES} bytes: keep more in fields of the session")
    ends = None if expires is None else now + expires
    return {"id": chance.token_hex(8), "question": question, "data": data, "asked": now, "expires": ends}


def closed(inputs: Iterable[Input], fields: Mapping[str, Any]) -> set[str]:
    """The names of the open questions that these inputs answer, or whose time is over with them."""
    requests = {each.request_id for each in inputs}
    over = {each.wake for each in inputs}
    return {name for name, ask in _kept(fields) if _request_of(ask) in requests or wake_of(name) in over}


def late(inputs: Iterable[Input], fields: Mapping[str, Any]) -> set[str]:
    """The wakes among these inputs at which questions expire that others of them answer."""
    over = {each.wake for each in inputs if each.wake is not None and each.wake.startswith(_WAKE)}
    if not over:
        return set()
    requests = {each.request_id for each in inputs}
    return {wake for name, ask in _kept(fields) if (wake := wake_of(name)) in over and _request_of(ask) in requests}


def _kept(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key.removeprefix(FIELD), fields[key]) for key in fields if key.startswith(FIELD)]


def _request_of(ask: Any) -> str:
    """The request of the answer to an open question. It names the question by a random id, not by its name."""
    return f"answer {ask['id']}" if isinstance(ask, dict) and "id" in ask else ""


def _question(kept: Any) -> dict[str, Any] | None:
    """The content of a field as `opened` makes it; None for anything else, which callers can write there as well."""
    if not isinstance(kept, dict) or not {"id", "question", "data", "asked", "expires"} <= kept.keys():
        return None
    texts, times = (kept["id"], kept["question"]), (kept["asked"], kept["expires"] or 0)
    good = all(isinstance(each, str) for each in texts) and all(type(each) in (int, float) for each in times)
    return kept if good and len(codec.encode(kept, "question")) <= _BYTES + 1000 and len(kept["id"]) < 100 else None


def open_in(context: RecordContext, entry: CachedRecord, user: str | None) -> list[Ask]:
    """The oldest open questions of a session that was read. Raises AccessDenied if one may not be read."""
    keys = [key for name in entry.fields if (key := codec.decode_key(name)).startswith(FIELD)]
    kept = {} if entry.deleted else {key: _question(context.value(entry, key, None)) for key in keys}
    context.allow("read", *kept)
    found = [
        Ask(
            context.ref.id, key.removeprefix(FIELD), ask["id"], ask["question"], ask["data"], ask["asked"],
            ask["expires"], user,
        )
        for key, ask in kept.items()
        if ask is not None and _is_open(context, entry, ask)
    ]  # fmt: skip
    return sorted(found, key=lambda each: each.asked)[:_MOST]


def _is_open(context: RecordContext, entry: CachedRecord, ask: Mapping[str, Any]) -> bool:
    request = request_log.name_of(_request_of(ask))
    answered = request is not None and inbox.fate_of(entry, request_log.tag_of(request)) is not None
    return not answered and not _expired(context, ask)


def _expired(context: RecordContext, ask: Mapping[str, Any]) -> bool:
    """Whether turns see the wake at which it expires."""
    return ask["expires"] is not None and ask["expires"] <= context.now() + inbox.AHEAD


async def of_page(contexts: Sequence[RecordContext], users: Iterable[str | None]) -> list[Ask]:
    """The open questions of these sessions, in their order; `users` are their users. One round trip."""
    if not contexts:
        return []
    tiers = contexts[0].tiers
    entries = await read_path.read_many(tiers, [each.keys for each in contexts], fresh=True)
    await tiers.clock.know()
    rows = zip(contexts, entries, users, strict=True)
    return [ask for context, entry, user in rows for ask in open_in(context, entry, user)]


async def answer(context: RecordContext, name: str, value: Any, id: str | None, durability: str | None) -> bool:
    """Post the answer to an open question: see `session.answer`."""
    field = field_of(name)
    entry = await context.read(fresh=True, field=field)
    kept = None if entry.deleted else _question(context.value(entry, field, None))
    await context.tiers.clock.know()
    if kept is None or id not in (None, kept["id"]) or _expired(context, kept):
        raise NotFound(f"{context.text[:200]}: there is no open question {name!r:.80}: it was answered, or it expired")
    if isinstance(value, str):
        text, metadata = value, {_ANSWERS: name}
    else:
        text, metadata = codec.encode(value, "value").decode(), {_ANSWERS: name, _VALUE: value}
    message = {"role": "user", "content": text, "metadata": metadata}
    return await inbox.post_first(context, message, _request_of(kept), durability)
