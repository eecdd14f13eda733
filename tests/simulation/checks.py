"""What must be true of a run. Law: a check compares what clients saw with what the history says, and names the promise.

When all faults have healed, the history of each record is read over the public API: its main line and its branches.
That is one sequence of changes each, and everything that any client was told must be explained by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_state import AsyncStateStore
from distributed_state.values.results import Change
from tests.simulation.workload import ACKNOWLEDGED, REFUSED, Outcome, secret

COLLECTION = "notes"
Writers = Mapping[str, Outcome]


class Broken(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


@dataclass(frozen=True, slots=True)
class State:
    """What a record holds at a version."""

    fields: dict[str, Any]
    messages: list[str]
    items: dict[tuple[str, str], Any]

    def after(self, change: Change) -> State:
        """The state behind one change, by what the change says of itself."""
        fields = {key: value for key, value in self.fields.items() if key not in change.deleted} | change.set
        items = dict(self.items)
        for key, item in change.items.items():
            if item is None:
                items.pop(key, None)
            else:
                items[key] = item.value
        return State(fields, self.messages + [str(each.content) for each in change.appended], items)


EMPTY = State({}, [], {})
_KEEP_LEASES = {"forget scripts", "drop subscribers", "sql away", "sql frozen", "sql loses answers", "disk full"}
_MAY_CHANGE_NOTHING = {"item delete", "delete field", "delete record", "clear", "roll back", "fork"}


@dataclass(frozen=True, slots=True)
class Line:
    """Changes of a record in order, from a version on, with the state behind each; the first stands behind `base`."""

    name: str
    base: int
    changes: list[Change]
    states: list[State]

    def state(self, version: int) -> State | None:
        """The state at a version that is of this line, else None."""
        at = version - self.base
        return self.states[at] if 0 <= at < len(self.states) else None


@dataclass(frozen=True, slots=True)
class Found:
    """One record when all is over."""

    id: str
    main: Line
    branches: list[Line]
    version: int
    state: State
    aside: frozenset[str]  # writers whose commits are in a branch that lacks versions

    def lines(self) -> list[Line]:
        """The main line first."""
        return [self.main, *self.branches]


def fold(start: State, changes: Sequence[Change], base: int, name: str, writers: Writers, main: Line | None) -> Line:
    """The states behind these changes; a branch begins in the `main` line."""
    states = [start]
    for at, change in enumerate(changes):
        if change.version != base + at + 1:
            raise Broken("G1", f"{name}: version {change.version} follows {base + at}")
        state = states[-1].after(change)
        if change.actor in writers and writers[change.actor].operation.kind in ("clear", "delete record"):
            state = EMPTY
        elif change.kind == "rollback":
            target = writers[change.actor].target
            restored = main.states[target] if main is not None and target <= base else states[target - base]
            if state.fields != restored.fields:
                raise Broken("G9", f"{name}: a rollback to version {target} made {state}, which was {restored}")
            state = restored
        states.append(state)
    return Line(name, base, list(changes), states)


async def read(store: AsyncStateStore, id: str, writers: Writers, source: State = EMPTY) -> Found:
    """Everything that is known of a record, forked from `source`. Raises Broken if it contradicts itself."""
    session = store.session(id)
    changes = await session.history()
    main = fold(State({}, source.messages, source.items), changes, 0, id, writers, None)
    branches, aside = [], set[str]()
    for branch in await session.branches():
        changes = await session.history(branch=branch.id)
        start = main.state(branch.base)
        if branch.complete and start is not None:
            branches.append(fold(start, changes, branch.base, f"{id} branch {branch.id}", writers, main))
        else:
            aside |= {change.actor for change in changes}
    view = await session.view(fresh=True)
    messages = [str(each.content) for each in await session.messages(fresh=True)]
    items = {
        (COLLECTION, key): value for key in "xy" if (value := await session.items(COLLECTION).get(key)) is not None
    }
    found = State(dict(view), messages, items)
    _judge_tokens(id, main)
    if view.version != len(main.changes):
        raise Broken("G4", f"{id}: Redis is at version {view.version}, its history at {len(main.changes)}")
    if found != main.states[-1]:
        raise Broken("G9", f"{id}: {found} is not the fold of its history, {main.states[-1]}")
    if main.changes:
        past = await session.at(version=max(1, view.version - 3))
        expected = main.states[max(1, view.version - 3)]
        if dict(past.fields) != expected.fields:
            raise Broken("G9", f"{id}: at version {past.version} it was {past.fields}, not {expected.fields}")
    return Found(id, main, branches, view.version, found, frozenset(aside))


def judge(
    found: Found,
    outcomes: Sequence[Outcome],
    *,
    staleness: float,
    losses: Sequence[tuple[float, float]],
) -> None:
    """Compare what clients saw of one record with its history. `losses`: what a server lost, from when to when.

    Raises Broken.
    """
    writes: dict[str, list[Outcome]] = {}  # tries of one request, by its writer
    reads = []
    for each in outcomes:
        if found.id in each.records and each.operation.kind != "emit":
            if each.is_write:
                writes.setdefault(each.writer, []).append(each)
            else:
                reads.append(each)
    places = {line.name: _places(line) for line in found.lines()}
    main = places[found.main.name]
    for tries in writes.values():
        _judge_write(found, tries, places, losses)
    _judge_order(found, writes, main)
    for each in reads:
        for _, version, seen in each.seen:
            _judge_read(found, each, version, seen, writes, main, staleness, losses)


def _places(line: Line) -> dict[str, list[int]]:
    """The versions of a line by their writer."""
    places: dict[str, list[int]] = {}
    for change in line.changes:
        places.setdefault(change.actor, []).append(change.version)
    return places


def _judge_tokens(id: str, main: Line) -> None:
    """Whoever holds a record later has a greater token."""
    latest = 0
    for change in main.changes:
        if 0 < change.token < latest:
            raise Broken("G6", f"{id}: version {change.version} has token {change.token}, one before it {latest}")
        latest = max(latest, change.token)


def _judge_write(
    found: Found,
    tries: Sequence[Outcome],
    places: dict[str, dict[str, list[int]]],
    losses: Sequence[tuple[float, float]],
) -> None:
    each = tries[-1]
    for line in found.lines():
        versions = places[line.name].get(each.writer, [])
        if len(versions) > 1:
            raise Broken("G3", f"{each} was applied as versions {versions} of {line.name}")
        if versions:
            if all(each.state == REFUSED for each in tries):
                raise Broken("G11", f"{each} is version {versions[0]} of {line.name}")
            _judge_base(line, versions[0], [each for each in tries if not each.repeated])
    main = places[found.main.name].get(each.writer, [])
    for each in tries:
        if each.state == ACKNOWLEDGED and not main:
            _judge_loss(found, each, places, losses)
        elif each.state == ACKNOWLEDGED and len(tries) == 1 and each.version not in (0, main[0]):
            raise Broken("G1", f"{each} is version {main[0]} of {found.id}")


def _judge_loss(
    found: Found, each: Outcome, places: dict[str, dict[str, list[int]]], losses: Sequence[tuple[float, float]]
) -> None:
    """Whether what was acknowledged and is not in the main line is where it may be."""
    if each.operation.kind in _MAY_CHANGE_NOTHING:
        return
    if each.level in ("archived", "fsynced"):
        raise Broken("G5", f"{each} was acknowledged as {each.level} and is not in the history of {found.id}")
    if any(each.writer in places[line.name] for line in found.branches) or each.writer in found.aside:
        return
    judge_loss(each, losses)


def judge_loss(each: Outcome, losses: Sequence[tuple[float, float]]) -> None:
    """Whether an acknowledged write may be nowhere: its server lost it, and its writer died. Raises Broken."""
    if not each.died:
        raise Broken("G8", f"{each} is neither in a history nor in a branch, and its writer lives")
    if not any(since <= each.ended and each.began <= until for since, until in losses):
        raise Broken("G4", f"{each} is neither in a history nor in a branch, and no server lost it")


def _judge_base(line: Line, version: int, tries: Sequence[Outcome]) -> None:
    """Whether what a change relied on was so, as one of the tries to make it saw it."""
    before = line.state(version - 1)
    wrong = []
    for each in tries:
        name = {"turn": "count", "locked": "held", "set if equal": "swaps"}.get(each.operation.kind, "sum")
        if each.base is not None and version != each.base + 1:
            wrong.append(f"{each} demanded version {each.base} and became {version} of {line.name}")
        elif each.counted is not None and before is not None and before.fields.get(name, 0) != each.counted:
            wrong.append(
                f"{each} read {name}={each.counted}; before version {version} it was {before.fields.get(name)}"
            )
    if wrong and len(wrong) == len(tries):
        raise Broken("G2", "; ".join(wrong))


def _judge_order(found: Found, writes: dict[str, list[Outcome]], main: dict[str, list[int]]) -> None:
    """What was acknowledged before another began is before it. Of several tries any may be the one that counted."""
    latest_began, latest = -1.0, None
    for version, writer in sorted((versions[0], writer) for writer, versions in main.items() if writer in writes):
        tries = writes[writer]
        ended = max(each.ended if each.state == ACKNOWLEDGED else math.inf for each in tries)
        began = min(each.began for each in tries)
        if latest is not None and ended < latest_began:
            raise Broken(
                "G1", f"{found.id}: {tries[-1]} is version {version}, and {latest} began later and is before it"
            )
        if began > latest_began:
            latest_began, latest = began, tries[0]


def _judge_read(
    found: Found,
    each: Outcome,
    version: int,
    seen: dict[str, Any],
    writes: dict[str, list[Outcome]],
    main: dict[str, list[int]],
    staleness: float,
    losses: Sequence[tuple[float, float]],
) -> None:
    # A read may see a commit that the server loses later, with the one who wrote it.
    is_lost = found.aside or any(since <= each.ended and each.began <= until for since, until in losses)
    if version < 0:
        texts = seen["messages"]
        doubled = [text for text, count in Counter(texts).items() if count > 1]
        if doubled:
            raise Broken("G3", f"{each} saw {doubled} twice")
        if not any(texts == state.messages for line in found.lines() for state in line.states) and not is_lost:
            raise Broken("G9", f"{each} saw {texts}, which no version of {found.id} is")
        return
    fits = [line for line in found.lines() if (state := line.state(version)) is not None and state.fields == seen]
    if not fits and not is_lost:
        raise Broken(
            "G9", f"{each} saw {seen} as version {version} of {found.id}, which {found.main.state(version)} is"
        )
    if fits and fits[0] is found.main:
        since = each.began if each.fresh else each.began - staleness
        for writer, (at, *_) in main.items():
            if at > version and all(
                other.ended < since and other.state == ACKNOWLEDGED for other in writes.get(writer, (each,))
            ):
                raise Broken("G10", f"{each} saw version {version}, though {writer} was acknowledged as {at} before")


def judge_leases(outcomes: Sequence[Outcome], faults: Iterable[str]) -> None:
    """Nobody loses a lease but by a fault that can take one. Raises Broken."""
    if all(fault in _KEEP_LEASES for fault in faults):
        for each in outcomes:
            if each.error.startswith(("Fenced", "Interrupted")):
                raise Broken("G6", f"{each}, and nothing can have taken it")


def judge_errors(outcomes: Sequence[Outcome]) -> None:
    """Nobody is told that something is set up wrongly, as nothing is. Raises Broken."""
    for each in outcomes:
        if each.error.startswith(("ConfigurationError", "NotPermitted")):
            raise Broken("errors", f"{each}")


def judge_erased(rest: bytes, outcomes: Sequence[Outcome]) -> None:
    """Nothing of what was erased is anywhere. `rest`: all that SQL and Redis hold. Raises Broken."""
    for erased in outcomes:
        if erased.operation.kind == "erase" and erased.state == ACKNOWLEDGED:
            for each in outcomes:
                mine = each.operation.kind == "keep secret" and each.operation.record == erased.operation.record
                if mine and each.ended < erased.began and secret(each.writer).encode() in rest:
                    raise Broken("erasure", f"{erased}, and what {each} is still there")
