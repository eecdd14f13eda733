"""Questions to people: a turn asks, and its session waits for the answer. Law: each question has one answer.

An open question is a field of the session, in the phase "waiting_feedback". The answer is an input, whose request names
the question, so that only the first answer is accepted; the turn that takes it closes the question. A question that
expires has a wake.

Design: section 31.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed_state.conversation import inbox
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.records.context import RecordContext
from distributed_state.results import Ask, Input
from distributed_state.values import chance, codec

PHASE = "waiting_feedback"
_FIELD = "ask."
_ANSWERS = "answers"  # in an answer's metadata: the name of the question


def field_of(name: str) -> str:
    """The field of the open question with this name. Raises InvalidValue."""
    if not isinstance(name, str) or len(name) > 100:
        raise InvalidValue(f"the name of a question is a str of at most 100 characters, not {name!r:.80}")
    return _FIELD + name


def wake_of(name: str) -> str:
    """The name of the wake at which a question expires."""
    return f"ask {name}"


def opened(question: str, data: Any, now: float, expires: float | None) -> dict[str, Any]:
    """The content of the field. Raises InvalidValue."""
    if not isinstance(question, str) or not question:
        raise InvalidValue(f"a question is a str that is not empty, not {question!r:.80}")
    codec.encode(data, "data")
    ends = None if expires is None else now + expires
    return {"id": chance.token_hex(8), "question": question, "data": data, "asked": now, "expires": ends}


def closed(inputs: Iterable[Input], fields: Mapping[str, Any]) -> set[str]:
    """The names of the open questions that these inputs answer, or whose time is over with them."""
    requests = {each.request_id for each in inputs}
    over = {each.wake for each in inputs}
    kept = {key.removeprefix(_FIELD): fields[key] for key in fields if key.startswith(_FIELD)}
    return {name for name, ask in kept.items() if _request_of(ask) in requests or wake_of(name) in over}


def _request_of(ask: Any) -> str:
    """The request of the answer to an open question. It names the question by a random id, not by its name."""
    return f"answer {ask['id']}" if isinstance(ask, dict) and "id" in ask else ""


def all_of(session: str, user: str | None, fields: Mapping[str, Any]) -> list[Ask]:
    """The open questions of a session, the oldest first."""
    found = [
        Ask(session, key.removeprefix(_FIELD), kept["question"], kept["data"], kept["asked"], kept["expires"], user)
        for key, kept in fields.items()
        if key.startswith(_FIELD) and isinstance(kept, dict) and "question" in kept
    ]
    return sorted(found, key=lambda each: each.asked)


async def answer(context: RecordContext, name: str, value: Any, durability: str | None) -> bool:
    """Post the answer to an open question: see `session.answer`."""
    field = field_of(name)
    entry = await context.read(fresh=True, field=field)
    kept = None if entry.deleted else context.value(entry, field, None)
    if not isinstance(kept, dict) or "id" not in kept:
        raise NotFound(f"{context.text[:200]}: there is no open question {name!r:.80}")
    text = value if isinstance(value, str) else codec.encode(value, "value").decode()
    message = {"role": "user", "content": text, "metadata": {_ANSWERS: name}}
    return await inbox.post_first(context, message, _request_of(kept), durability)
