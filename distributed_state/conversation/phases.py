"""Phases and the events that lead from one to the next.

Law: a transition commits only if the phase it leaves is current.

A table is checked when it is made. An event is checked when it is committed: the server compares the current phase with
the phase that the decision was based on, in the same atomic step as the write.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from distributed_state.errors import Conflict, InvalidTransition, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.context import RecordContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values.model import PHASE, Message, checked_phase


@dataclass(frozen=True, slots=True)
class StateMachine:
    """A table {(state, event): state}, the state to begin in, and a name for error messages.

    `final` holds the states in which a run has ended, by default the states without events. Raises InvalidValue if the
    table is empty, has names other than str of 1 to 200 characters, or has no way out of `initial`.
    """

    table: Mapping[tuple[str, str], str] = field(hash=False)
    initial: str = field(kw_only=True)
    name: str = field(default="machine", kw_only=True)
    final: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        _check(self.name, self.table, self.initial)
        table = MappingProxyType(dict(self.table))
        try:
            final = frozenset(self.final)
        except TypeError:
            raise InvalidValue(f"{self.name}: final is a set of states, not {self.final!r:.80}") from None
        final = final or frozenset(table.values()) - {state for state, _ in table}
        if strangers := final - {*table.values(), self.initial}:
            raise InvalidValue(f"{self.name}: final state {sorted(strangers, key=str)[0]!r} is in no row of the table")
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "final", final)

    def next(self, state: str, event: str) -> str:
        """The state that an event leads to. Raises InvalidTransition if it leads nowhere from `state`."""
        if not isinstance(event, str):
            raise InvalidValue(f"{self.name}: an event is a str, not {event!r:.80}")
        following = self.table.get((state, event))
        if following is None:
            allowed = ", ".join(self.events(state)) or "none"
            text = f"{self.name}: event {event!r:.80} is not allowed in phase {state!r:.80}; allowed there: {allowed}"
            raise InvalidTransition(text, phase=state, event=event)
        return following

    def events(self, state: str) -> tuple[str, ...]:
        """The events allowed in a state, in the order of the table."""
        return tuple(event for start, event in self.table if start == state)

    @property
    def states(self) -> frozenset[str]:
        """Every state of the table."""
        return frozenset({self.initial, *self.table.values(), *(state for state, _ in self.table)})

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"initial": self.initial, "name": self.name, "final": self.final}
        return partial(StateMachine, **known), (dict(self.table),)  # type: ignore[arg-type]  # the types of __init__


def _check(name: Any, table: Any, initial: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidValue(f"the name of a machine is a non-empty str, not {name!r:.80}")
    if not isinstance(table, Mapping) or not table:
        raise InvalidValue(f"{name}: a table is a non-empty mapping {{(state, event): state}}, not {table!r:.80}")
    for row, following in table.items():
        words = (*row, following) if isinstance(row, tuple) else ()
        if len(words) != 3 or not all(isinstance(word, str) and word for word in words):
            raise InvalidValue(
                f"{name}: a row is (state, event): state, each a non-empty str, not {row!r}: {following!r}"
            )
    for following in table.values():
        checked_phase(following)
    if not isinstance(initial, str) or all(state != initial for state, _ in table):
        raise InvalidValue(f"{name}: no row leads out of the initial state {initial!r:.80}")


TASK_MACHINE = StateMachine(
    {
        ("idle", "new_task"): "planning",
        ("planning", "plan_ready"): "executing",
        ("executing", "step_complete"): "executing",
        ("executing", "needs_input"): "waiting_feedback",
        ("waiting_feedback", "input_received"): "executing",
        ("executing", "task_complete"): "done",
    },
    initial="idle",
    name="task machine",
)
"""The phases of a task that is done step by step and may ask its user."""

REASONING_MACHINE = StateMachine(
    {
        ("idle", "new_task"): "planning",
        ("planning", "plan_ready"): "executing",
        ("executing", "reflect"): "reflecting",
        ("executing", "replan"): "planning",
        ("reflecting", "replan"): "planning",
        ("reflecting", "task_complete"): "done",
        ("reflecting", "fail"): "error",
    },
    initial="idle",
    name="reasoning machine",
)
"""The phases of a loop that reflects on its results before it plans again, answers, or gives up."""

DEFAULT = StateMachine(
    {
        **TASK_MACHINE.table,
        **REASONING_MACHINE.table,
        ("planning", "needs_input"): "waiting_feedback",
        ("idle", "task_complete"): "done",
        ("planning", "task_complete"): "done",
        ("waiting_feedback", "task_complete"): "done",
        ("error", "task_complete"): "done",
        ("reflecting", "resume"): "executing",
        ("reflecting", "needs_input"): "waiting_feedback",
        ("waiting_feedback", "replan"): "planning",
        ("idle", "fail"): "error",
        ("planning", "fail"): "error",
        ("executing", "fail"): "error",
        ("waiting_feedback", "fail"): "error",
        ("error", "fail"): "error",
        ("done", "new_task"): "planning",
        ("error", "new_task"): "planning",
    },
    initial="idle",
    name="default machine",
    final=frozenset({"done", "error"}),
)
"""Both tables above, with an answer or a failure from every phase but done, and a next task after done and error."""


async def transition(
    context: RecordContext,
    event: str,
    *,
    machine: StateMachine,
    set: Mapping[str, Any],
    append: Iterable[Message | dict[str, Any]],
) -> str:
    """Move the record's phase along the table, in one commit with the other changes; returns the new phase."""
    if not isinstance(machine, StateMachine):
        raise InvalidValue(f"machine is a StateMachine, not {machine!r:.80}")
    messages = tuple(append)
    entry = await read_path.read(context.tiers, context.keys)
    if entry.deleted or event not in machine.events(_phase(_raw(entry), machine)):
        # Hot may be slightly stale, so an event is refused only on the server's state.
        entry = await read_path.read(context.tiers, context.keys, fresh=True)
    context.refuse_deleted(entry)
    raw = _raw(entry)

    async def once() -> str:
        nonlocal raw
        following = machine.next(_phase(raw, machine), event)
        change = context.changes()
        change.set_many(set)
        for message in messages:
            change.append(message)
        change.phase(following)
        try:
            await context.commit(change.draft("transition", expectations=[(PHASE, raw)]))
        except Conflict as conflict:
            if conflict.found:
                raw = conflict.found[0]
            raise
        return following

    return await write_path.until_no_conflict(context.tiers, once)


def _raw(entry: CachedRecord) -> bytes | None:
    return None if entry.deleted else entry.fields.get(PHASE)


def _phase(raw: bytes | None, machine: StateMachine) -> str:
    return machine.initial if raw is None else raw.decode("utf-8", "surrogatepass")
