"""What an event may be called, and what it may be about. Law: checked before anything is written.

Design: section 12.
"""

from __future__ import annotations

import re
from typing import Any

from distributed_state.errors import InvalidValue
from distributed_state.values.model import MAX_ID_BYTES, Ref
from distributed_state.warm.consumer import RESYNC

_TYPE = re.compile(r"[\w.-]{1,200}", re.ASCII)


def checked_type(type: str) -> str:
    """A type of event that may be written. Raises InvalidValue."""
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
