"""What a model sees: the end of the conversation and what is known beside it. Law: one round trip at most.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state.conversation.tokens import Counter, counted
from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records import messages as shown_messages
from distributed_state.records.context import RecordContext
from distributed_state.tiers import read as read_path
from distributed_state.values import codec, message_ranges
from distributed_state.values.model import PHASE, Message

_OWN = ("agent.", "workflow.")


@dataclass(frozen=True, slots=True)
class Context:
    """One look at a session and at the records beside it.

    `messages` are the last ones, oldest first; `fields` are the session's, without those of an AgentState or Workflow;
    `facts` holds the fields of each other record under its scope and id, as in `facts["user:u1"]`; `context_tokens`
    counts the messages and the rendered state.
    """

    messages: tuple[Message, ...]
    fields: dict[str, Any]
    phase: str | None
    facts: dict[str, dict[str, Any]]
    context_tokens: int

    def render(self) -> str:
        """The state as text for a system message: a heading for each record, a line `name: JSON` for each field.

        Values are JSON on one line each, so that what a user once said cannot pass for a heading or another field; of
        bytes it says how many they are.
        """
        return _render(self.fields, self.phase, self.facts)

    def to_messages(self) -> list[Message]:
        """The messages with the rendered state in front, as a system message."""
        text = self.render()
        return [*([Message(role="system", content=text)] if text else []), *self.messages]


async def look(contexts: Sequence[RecordContext], last: int, counter: Counter) -> Context:
    """The session, which comes first, and the others: what is not hot comes in one exchange."""
    if type(last) is not int or last < 0:
        raise InvalidValue(f"last is an int from 0 on, not {last!r}")
    session = contexts[0]
    entries = await read_path.read_many(session.tiers, [each.keys for each in contexts])
    shown = [_shown(each, entry) for each, entry in zip(contexts, entries, strict=True)]
    messages = tuple(await _messages(session, entries[0], last))
    stored = None if entries[0].deleted else entries[0].fields.get(PHASE)
    phase = None if stored is None else stored.decode("utf-8", "surrogatepass")
    facts = {each.text: fields for each, fields in zip(contexts[1:], shown[1:], strict=True)}
    rendered = _render(shown[0], phase, facts)
    head = [Message(role="system", content=rendered)] if rendered else []
    tokens = sum(counted(counter, message) for message in (*head, *messages))
    return Context(messages, shown[0], phase, facts, tokens)


def _shown(context: RecordContext, entry: CachedRecord) -> dict[str, Any]:
    return {key: value for key, value in sorted(context.fields(entry).items()) if not key.startswith(_OWN)}


async def _messages(context: RecordContext, entry: CachedRecord, last: int) -> list[Message]:
    if entry.deleted:
        return []
    runs = message_ranges.last(message_ranges.segments(context.text, entry.fields), last)
    if any(n not in entry.messages for run in runs for n in range(run.start, run.stop)):
        entry = await read_path.load_whole(context.tiers, context.keys, entry)
        runs = message_ranges.last(message_ranges.segments(context.text, entry.fields), last)
    return await shown_messages.visible(context.tiers, context.keys, entry, runs)


def _render(fields: dict[str, Any], phase: str | None, facts: dict[str, dict[str, Any]]) -> str:
    parts = [_part("session" if phase is None else f"session, in phase {_json(phase)}", fields)]
    parts += [_part(name, known) for name, known in facts.items()]
    return "\n\n".join(part for part in parts if part)


def _part(name: str, fields: dict[str, Any]) -> str:
    lines = [f"{_json(key) if _odd(key) else key}: {_json(value)}" for key, value in fields.items()]
    return "\n".join([f"# {name}", *lines]) if lines or "," in name else ""


def _odd(key: str) -> bool:
    return not key.isprintable() or key[:1] in ("#", '"') or ": " in key


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"  # no JSON begins so
    return codec.encode(value).decode().strip()
