"""Which messages are kept when not all can be. Law: pure; whole turns, and never a result without its call.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed_state.conversation.tool_call_format import calls, results
from distributed_state.values.model import Message


def turns(messages: Sequence[Message]) -> list[int]:
    """Where turns begin: at each user message, but for one that stands between a call and its late result.

    A result is looked for in its own turn and the next one: otherwise one without a call would join all turns.
    """
    starts: list[int] = []
    before: set[str] = set()  # calls of the turn before that it left without a result
    waiting: set[str] = set()  # those of this turn
    for place, message in enumerate(messages):
        if message.role == "user":
            starts.append(place)
            before = waiting
            waiting = set()
        for id in results(message):
            if id in waiting:
                waiting.remove(id)
            elif id in before and starts:
                starts.pop()
                before = set()
        waiting.update(call.id for call in calls(message))
    return starts


def choose(
    messages: Sequence[Message],
    counts: Sequence[int],
    *,
    room: int,
    keep_last: int,
    complete: bool,
    must: int | None = None,
) -> int | None:
    """The place of the first message that is kept: whole turns, the newest first, as long as they fit in `room`.

    The last `keep_last` turns, and all from the place `must` on, are kept whatever they count. What comes before the
    first user message is a turn too. None: these messages are not the whole conversation (`complete`), and older ones
    have to be known to decide.
    """
    starts = turns(messages)
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    unsure = None
    if complete:
        starts = sorted({0, *starts}) if messages else []
    elif first is not None and not _answers_itself(messages, first):
        unsure = first  # a result in the oldest turn may belong to a call that was not read
    must = len(messages) if must is None else must
    cut = len(messages)
    kept = 0
    total = 0
    for start in reversed(starts):
        total += sum(counts[start:cut])
        if total > room and kept >= keep_last and cut <= must:
            return cut
        if start == unsure:
            return None
        cut = start
        kept = kept + 1
    total += sum(counts[:cut])
    return cut if complete or (total > room and kept >= keep_last and cut <= must) else None


def _answers_itself(messages: Sequence[Message], start: int) -> bool:
    known: set[str] = set()
    for place in range(start, len(messages)):
        if place > start and messages[place].role == "user":
            break
        if not known.issuperset(results(messages[place])):
            return False
        known.update(call.id for call in calls(messages[place]))
    return True


def with_calls(messages: Sequence[Message]) -> list[int]:
    """The places of all messages but those that are results of calls that are not among them."""
    known: set[str] = set()
    places = []
    for place, message in enumerate(messages):
        if message.role != "tool" or known.issuperset(results(message)):
            places.append(place)
        known.update(call.id for call in calls(message))
    return places
