"""Which records somebody holds. Law: it is looked at, and nothing is changed by that: it may be over when it is read.

Design: section 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed_state.port import Words
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.patience import Patience


async def seconds(patience: Patience, records: Sequence[RecordKeys]) -> list[float | None]:
    """How long the lease of each lasts unless it is renewed, None of those that nobody holds. One round trip."""
    metas = list(dict.fromkeys(names.meta for names in records))
    commands: list[Words] = [(b"HGET", meta, b"journal") for meta in metas]
    commands += [(word, names.lock) for names in records for word in (b"GET", b"PTTL")]
    answers = await patience.commands(commands) if commands else []
    epochs = {meta: (noted or b"").partition(b" ")[0] for meta, noted in zip(metas, answers, strict=False)}
    locks = zip(answers[len(metas) :: 2], answers[len(metas) + 1 :: 2], strict=True)
    # One of another epoch was granted before Redis lost something: it holds nothing any more (acquire.lua).
    return [
        left_ms / 1000 if held and left_ms > 0 and b"@%b:" % epochs[names.meta] in held else None
        for names, (held, left_ms) in zip(records, locks, strict=True)
    ]
