"""The types of events: those that the package publishes, and which types and subjects users' events may have.

Law: the package publishes no other type, and `data` lists all of its names. A user's event is checked before anything
is written.

Design: section 12.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.values.model import MAX_ID_BYTES, Ref
from distributed_state.warm.consumers import RESYNC


@dataclass(frozen=True, slots=True)
class EventType:
    """One type: its `subject`, when it is published, and the contents of its `data` by name."""

    name: str
    subject: str
    when: str
    data: Mapping[str, str] = field(default_factory=dict)


_SESSION, _CLIENT = "the session", "`client:` and the client's name"
TYPES = (
    EventType(
        "conversation.created", _SESSION, "A session begins: its first commit, or the first after it was deleted.",
        {"is_clear": "true if `create(is_clear=True)` began it; else it is not there"},
    ),
    EventType(
        "conversation.cleared", "the record", "`clear()` removed its fields.",
        {"messages": "whether its messages went, too"},
    ),
    EventType(
        "conversation.switched", _SESSION, "`session.switch()`: a client goes on with this conversation.",
        {
            "conversation_id": "its id",
            "previous_id": "the conversation that the client had before, or an empty text",
            "message_count": "how many messages it shows",
            "client": "who goes on, as it calls itself",
        },
    ),
    EventType(
        "turn.failed", _SESSION, "Its handler failed so often that the session is stuck: no worker tries again.",
        {"handler": "its handler", "attempts": "how often it failed in a row", "error": "the class of the last error"},
    ),
    EventType(
        "conversation.deleted", "the record", "It was deleted or erased. An erased record keeps only this event.",
    ),
    EventType(
        "conversation.diverged", "the record",
        "A failover left commits that the record cannot go on from; they are kept in a branch.",
        {
            "branch": "the branch's id, for `at`, `history`, `fork` and `drop_branch`",
            "base": "the version that it begins behind",
            "commits": "how many there are",
            "cause": "how it came to be, in words",
        },
    ),
    EventType(
        "conversation.repaired", "the record",
        "`repair` copied it to SQL, which was restored from an older backup. Only in the audit.",
        {
            "version": "the version that SQL has since, which came whole or leaves out what is lost",
            "after": "SQL's last version before it; those between the two cannot be read",
            "aside": "how many commits between the two are kept in the quarantine, resolved",
            "lost": "the messages that are lost, as pairs of a first and a last number",
            "items": "whether items may be lost",
            "deleted": "whether it was deleted again, as it was before the restore",
        },
    ),
    EventType(
        "session.expired", _SESSION, "Its time is over: it ended, as if deleted.",
        {"reason": "`idle` or `lifetime`"},
    ),
    EventType(
        "session.phase", "the record", "It moved to another phase, in the commit that did so.",
        {"phase": "the new phase, null for none"},
    ),
    EventType(
        "session.checkpoint", "the record", "`checkpoint()` named its state.",
        {"label": "the name"},
    ),
    EventType(
        "session.rollback", "the record", "`rollback()` made it what it was.",
        {"version": "the version whose state it has again"},
    ),
    EventType(
        "agent.switched", _CLIENT, "`store.activate_agent()`: a client goes on with another agent.",
        {
            "previous_agent": "the agent before, or an empty text",
            "next_agent": "the agent from now on; null: none",
            "conversation_id": "where, or an empty text",
            "client": "who, as it calls itself",
        },
    ),
    EventType(
        "directory.changed", _CLIENT, "`store.change_directory()`: a client's user works from another folder.",
        {"old_path": "the folder before, or an empty text", "new_path": "the folder now", "client": "who"},
    ),
    EventType(
        "config.changed", "the record of the fleet's configs", "`reload_config` gave agents another config.",
        {
            "agent": "the agent's name; an empty text: all",
            "changed": "its names whose values changed, sorted",
            "digest": "SHA-256 of the new config; its values are in the record alone",
        },
    ),
    EventType(
        "lock.lost", "the record", "A lock was lost while it was held, as far as its holder could still say so.",
        {"token": "its fencing token", "holder": "who had it"},
    ),
    EventType(
        "maintenance.announced", "none", "Somebody announced maintenance (`distributed-state maintenance on`).",
        {"ends": "when it ends, in seconds since 1970", "reason": "why, or an empty text"},
    ),
    EventType("maintenance.ended", "none", "Somebody ended the maintenance before its announced end.", {}),
    EventType(
        "replica.lost", "`replica:` and its id", "A replica fell silent without closing its store.",
        {"replica": "its id", "host": "where it ran", "pid": "its process"},
    ),
    EventType(
        "resync", "none", "In place of missed events that are no longer kept. It is not stored.",
        {"reason": "`trimmed` (they were too old), `epoch` or `rewound` (Redis lost some); several with `+` between",
         "partitions": "those whose events were missed"},
    ),
)  # fmt: skip


# Users' events

_TYPE = re.compile(r"[\w.-]{1,200}", re.ASCII)


def checked_type(type: str) -> str:
    """Return a valid type of a user's event. Raises InvalidValue."""
    if not isinstance(type, str) or not _TYPE.fullmatch(type) or type == RESYNC:
        raise InvalidValue(
            f"an event's type is a word like 'mail.sent', of letters, digits, '.', '_' and '-', not {type!r:.80}"
        )
    return type


def checked_subject(subject: Any) -> str:
    """The text of a subject: a record's, or any printable text."""
    ref = getattr(subject, "ref", None)
    if isinstance(ref, Ref):
        return ref.text
    text = subject
    if not isinstance(text, str) or len(text.encode("utf-8", "replace")) > MAX_ID_BYTES:
        raise InvalidValue(f"a subject is a record or a str of at most {MAX_ID_BYTES} bytes, not {subject!r:.80}")
    if not text.isprintable():
        raise InvalidValue(f"a subject is printable text, not {text!r:.80}")
    return text
