"""The checks of a run. Law: a check compares what clients saw with the history, and names the broken promise.

When all faults have healed, the history of each record is read through the public API: its main line and its
branches. Each of these is one sequence of changes, and together they must explain every answer that a client got.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from distributed_state import AsyncStateStore
from distributed_state.errors import StateError
from distributed_state.results import (
    Abandoned,
    Change,
    Chunk,
    Ended,
    Failed,
    Input,
    OutputPart,
    Restarted,
    Snapshot,
    Truncated,
)
from distributed_state.values.model import Message
from tests.simulation.workload import (
    ACKNOWLEDGED,
    BRIEF,
    BRIEF_SECONDS,
    ERASURES,
    IDLE,
    PRIVATE,
    REFUSED,
    Outcome,
    lasting,
    private,
    secret,
    short,
)

COLLECTION = "notes"
Writers = Mapping[str, Outcome]


class Broken(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


@dataclass(frozen=True, slots=True)
class State:
    """The contents of a record at a version. `brief`: the field that expires, as if it never did."""

    fields: dict[str, Any]
    messages: list[str] | None  # None where some are lost, and a repair named them
    items: dict[tuple[str, str], Any]
    brief: str | None = field(default=None, compare=False)

    def after(self, change: Change) -> State:
        """The state after one change, according to the history's record of the change."""
        fields = {key: value for key, value in self.fields.items() if key not in change.deleted} | lasting(change.set)
        items = dict(self.items)
        for key, item in change.items.items():
            if item is None:
                items.pop(key, None)
            else:
                items[key] = item.value
        brief = change.set.get(BRIEF, None if BRIEF in change.deleted else self.brief)
        said = None if self.messages is None else self.messages + _said(change.appended)
        return State(fields, said, items, brief)


def _said(messages: Iterable[Message]) -> list[str]:
    return [str(each.content) for each in messages]


EMPTY = State({}, [], {})
_KEPT = 4  # changes that a purge keeps, the newest ones
_SLOW = 1.0  # seconds: a message and its answer take less than this together
_SLACK = 0.05  # seconds by which the time of a server may be misestimated
_HELD_UP = 4.0  # seconds: two waits for a lock
_ALL_HEARD = {"power cut", "restart server", "evict", "forget scripts"}
_KEEP_LEASES = {
    "clock jump", "forget scripts", "drop subscribers", "sql away", "sql frozen", "sql loses answers", "disk full",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Harm:
    """A fault, with the time that it lasted. `who`: the one replica that it affected, "" if it affected all.

    `group`: the name of the first server of the only group of a cluster that it affected.
    """

    kind: str
    who: str
    since: float
    until: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Befell:
    """What happened to a fleet.

    `losses`: when servers lost what they wrote, as intervals; `joined`: when each replica was opened; `ttl`: of leases;
    `takeovers`: the losses that occurred because a replica took over that had less data; `flushes`: those because Redis
    was emptied by a command, which is fsynced and replicated, too.
    """

    losses: Sequence[tuple[float, float]]
    harms: Sequence[Harm]
    joined: Mapping[str, float]
    staleness: float
    ttl: float
    takeovers: Sequence[tuple[float, float]] = ()
    flushes: Sequence[tuple[float, float]] = ()

    def is_lost(self, each: Outcome, after: float = 0.0) -> bool:
        """Whether a server lost what was written or read during this operation, or up to `after` seconds later."""
        return _overlaps(each, [(since, until + after) for since, until in self.losses])

    def may_miss(self, each: Outcome) -> bool:
        """Whether this write may be missing although it was acknowledged at its level."""
        match each.level:
            case "fsynced":  # a replica that takes over does not know what is on the primary's disk
                return _overlaps(each, [*self.takeovers, *self.flushes])
            case "replicated":  # a primary that comes back with older data makes its replicas equally old
                return _overlaps(each, [loss for loss in self.losses if loss not in self.takeovers])
            case level:
                return level != "archived"

    def was_heard(self, each: Outcome) -> bool:
        """Whether its writer could report its commits, and recovery knew of the writer by what the server kept."""
        return (
            not each.died
            and all(harm.kind in _ALL_HEARD for harm in self.harms)
            and all(since > self.joined[each.replica] for since, until in self.losses)
        )

    def may_lose_lease(self, each: Outcome) -> bool:
        """Whether any fault may have taken a lease from its holder."""
        taking = [harm for harm in self.harms if harm.kind not in _KEEP_LEASES]
        if self.ttl < _SLOW:
            return bool(taking)
        return any(
            harm.since <= each.ended and each.began <= harm.until + 2 * self.ttl and harm.who in ("", each.replica)
            for harm in taking
        )


def _overlaps(each: Outcome, times: Sequence[tuple[float, float]]) -> bool:
    return any(since <= each.ended and each.began <= until for since, until in times)


@dataclass(frozen=True, slots=True)
class Line:
    """Changes of a record in order, starting at a version, with the state after each. The first one follows `base`."""

    name: str
    base: int
    changes: list[Change]
    states: list[State | None]  # None where a repair wrote only a later version

    @property
    def version(self) -> int:
        """The last version."""
        return self.base + len(self.states) - 1

    def lacks(self, version: int) -> bool:
        """Whether it is unknown which change made a version of this line; 0: any of its versions."""
        whole = [change.version for change in self.changes if change.kind == "repair"]
        is_lacking = version in whole or (self.base < version <= self.version and self.state(version) is None)
        return bool(whole) and (not version or is_lacking)

    def state(self, version: int) -> State | None:
        """The state at a version of this line, or None."""
        at = version - self.base
        return self.states[at] if 0 <= at < len(self.states) else None


@dataclass(frozen=True, slots=True)
class Found:
    """One record at the end of the run."""

    id: str
    main: Line
    branches: list[Line]
    version: int
    state: State
    aside: frozenset[str]  # writers with commits in a branch that lacks versions

    def lines(self) -> list[Line]:
        """All lines, the main line first."""
        return [self.main, *self.branches]


@dataclass(frozen=True, slots=True)
class Whole:
    """The state that a repair brought: without its snapshot if messages are partly lost."""

    snapshot: Snapshot | None
    items: dict[tuple[str, str], Any]

    def of(self, change: Change, before: State, name: str) -> State:
        """The state after this change of the repair, which sets all fields, or only omits messages. Raises Broken.

        A change does not say which items it hid, as after a rollback that SQL does not have.
        """
        brought = self.snapshot
        has_none = brought is not None and not lasting(brought.fields)
        fields = lasting(change.set) if change.set or has_none else before.fields
        messages = None if brought is None else _said(brought.messages)
        state = replace(before.after(change), fields=fields, messages=messages, items=self.items)
        if brought is not None and lasting(brought.fields) != fields:
            raise Broken("G9", f"{name}: {brought} came whole, and its change says {state}")
        for key, item in change.items.items():
            if self.items.get(key) != (None if item is None else item.value):
                raise Broken("G9", f"{name}: {self.items} came with version {change.version}, which says {item}")
        return state


def fold(
    start: State,
    changes: Sequence[Change],
    base: int,
    name: str,
    writers: Writers,
    main: Line | None,
    whole: Mapping[int, Whole],
) -> Line:
    """The states after these changes; a branch begins in the `main` line. `whole`: states that a repair brought."""
    line = Line(name, base, list(changes), [start])
    state = start
    for change in changes:
        if change.version in whole:
            line.states.extend([None] * (change.version - line.version - 1))
        if change.version != line.version + 1:
            raise Broken("G1", f"{name}: version {change.version} follows {line.version}")
        before, state = state, state.after(change)
        if change.version in whole:
            state = whole[change.version].of(change, before, name)
        elif change.actor in writers and writers[change.actor].operation.kind in ("clear", "delete record"):
            state = EMPTY
        elif change.kind == "rollback":
            target = writers[change.actor].target
            restored = (main if main is not None and target <= base else line).state(target)
            if restored is not None and state.fields != restored.fields:
                raise Broken("G9", f"{name}: a rollback to version {target} made {state}, which was {restored}")
            state = restored or state
        line.states.append(state)
    return line


async def _came_whole(session: Any, changes: Sequence[Change], *, may_lack: bool) -> dict[int, Whole]:
    """The states that a repair brought, by version."""
    found: dict[int, Whole] = {}
    for change in changes:
        if change.kind == "repair":
            try:
                snapshot = await session.at(version=change.version)
            except StateError:
                if not may_lack:
                    raise
                snapshot = None
            found[change.version] = Whole(snapshot, await _items(session, version=change.version))
    return found


async def _items(session: Any, *, version: int | None = None) -> dict[tuple[str, str], Any]:
    """The items that a record has, or had at a version."""
    values = await session.items(COLLECTION).get_many(("x", "y"), version=version)
    return {(COLLECTION, key): value for key, value in values.items()}


async def read(
    store: AsyncStateStore, id: str, writers: Writers, source: State = EMPTY, named: Collection[str] = ()
) -> Found:
    """Read the history of a record, which may be a fork of `source`. Raises Broken if the history contradicts itself.

    `named`: the records for which a repair reported lost messages.
    """
    session = store.session(id)
    changes = await session.history()
    whole = await _came_whole(session, changes, may_lack=id in named)
    main = fold(State({}, source.messages, source.items), changes, 0, id, writers, None, whole)
    branches, aside = [], set[str]()
    for branch in await store.admin.branches(session.id):
        changes = await session.history(branch=branch.id)
        start = main.state(branch.base)
        if branch.complete and start is not None:
            branches.append(fold(start, changes, branch.base, f"{id} branch {branch.id}", writers, main, {}))
        else:
            aside |= {change.actor for change in changes}
    if not main.changes:
        # A fork that was lost, or is in a branch, shows nothing of its source.
        main = fold(EMPTY, [], 0, id, writers, None, {})
    view = await session.view(fresh=True)
    messages = _said(await session.messages(fresh=True))
    found = State(lasting(view), messages, await _items(session))
    _judge_tokens(id, main)
    if view.version != main.version:
        raise Broken("G4", f"{id}: Redis is at version {view.version}, its history at {main.version}")
    if main.states[-1] is not None and main.states[-1].messages is None:
        found = replace(found, messages=None)
    if found != main.states[-1]:
        raise Broken("G9", f"{id}: {found} is not the fold of its history, {main.states[-1]}")
    expected = main.state(max(1, view.version - 3))
    if main.changes and expected is not None and expected.messages is not None:
        past = await session.at(version=max(1, view.version - 3))
        if lasting(past.fields) != expected.fields:
            raise Broken("G9", f"{id}: at version {past.version} it was {past.fields}, not {expected.fields}")
    return Found(id, main, branches, view.version, found, frozenset(aside))


def judge(found: Found, outcomes: Sequence[Outcome], befell: Befell) -> None:
    """Compare what clients saw of one record with its history. Raises Broken."""
    writes: dict[str, list[Outcome]] = {}  # the attempts of one request, by its writer
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
        _judge_write(found, tries, places, befell)
    _judge_order(found, writes, main)
    reading = _Reading(found, writes, main, befell)
    for each in reads:
        for _, version, seen in each.seen:
            if version < 0:
                reading.judge_part(each, seen)
            else:
                reading.judge_fields(each, version, seen)


def _places(line: Line) -> dict[str, list[int]]:
    """The versions of a line, by writer."""
    places: dict[str, list[int]] = {}
    for change in line.changes:
        places.setdefault(change.actor, []).append(change.version)
    return places


def _judge_tokens(id: str, main: Line) -> None:
    """Later holders of a record have greater tokens."""
    latest = 0
    for change in main.changes:
        if 0 < change.token < latest:
            raise Broken("G6", f"{id}: version {change.version} has token {change.token}, one before it {latest}")
        latest = max(latest, change.token)


def _judge_write(
    found: Found,
    tries: Sequence[Outcome],
    places: dict[str, dict[str, list[int]]],
    befell: Befell,
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
            _judge_loss(found, each, places, befell)
        elif each.state == ACKNOWLEDGED and len(tries) == 1 and each.version not in (0, main[0]):
            raise Broken("G1", f"{each} is version {main[0]} of {found.id}")


def _judge_loss(found: Found, each: Outcome, places: dict[str, dict[str, list[int]]], befell: Befell) -> None:
    """Check that an acknowledged write that is not in the main line is in a permitted place. Raises Broken."""
    if each.operation.kind == "fork":
        return  # the change is of another record
    if each.operation.kind == "delete record" and _was_deleted(found.main, each.version):
        return  # another writer did it
    if found.main.lacks(each.version):
        return  # SQL was older at that time, and a repair wrote only a later version
    if not befell.may_miss(each):
        raise Broken("G5", f"{each} was acknowledged as {each.level} and is not in the history of {found.id}")
    if any(each.writer in places[line.name] for line in found.branches) or each.writer in found.aside:
        if befell.was_heard(each):
            raise Broken("G8", f"{each} is in a branch, though its writer could say that it was to be put back")
        return
    judge_loss(each, befell)


def _was_deleted(line: Line, version: int) -> bool:
    return any(change.kind == "delete" and change.version <= version for change in line.changes)


def judge_loss(each: Outcome, befell: Befell) -> None:
    """Check that an acknowledged write may be nowhere: its server lost it, and its writer died. Raises Broken."""
    if not each.died:
        raise Broken("G8", f"{each} is neither in a history nor in a branch, and its writer lives")
    if not befell.is_lost(each):
        raise Broken("G4", f"{each} is neither in a history nor in a branch, and no server lost it")


def _judge_base(line: Line, version: int, tries: Sequence[Outcome]) -> None:
    """Check that the state before a change was what at least one attempt to make the change had read. Raises Broken."""
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
        elif each.relied is not None and before is not None and before.fields != each.relied:
            wrong.append(f"{each} was made from {each.relied}; before version {version} it was {before.fields}")
    if wrong and len(wrong) == len(tries):
        raise Broken("G2", "; ".join(wrong))


def _judge_order(found: Found, writes: dict[str, list[Outcome]], main: dict[str, list[int]]) -> None:
    """A write that was acknowledged before another began comes first. Any attempt may be the one that was applied."""
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


@dataclass(frozen=True, slots=True)
class _Reading:
    """The data that reads of one record are compared with. `writes`: attempts by writer; `main`: versions by writer."""

    found: Found
    writes: Mapping[str, Sequence[Outcome]]
    main: Mapping[str, Sequence[int]]
    befell: Befell

    def _may_be_lost(self, each: Outcome) -> bool:
        # A read may see a commit that the server and its writer lose later; hot shows it for a while longer.
        after = 0.0 if each.fresh else self.befell.staleness
        return bool(self.found.aside) or self.befell.is_lost(each, after)

    def judge_fields(self, each: Outcome, version: int, seen: dict[str, Any]) -> None:
        """Check that all fields belong to the version, and that the version was new enough. Raises Broken."""
        brief, seen = seen.get(BRIEF), lasting(seen)
        states = [(line, line.state(version)) for line in self.found.lines()]
        fits = [(line, state) for line, state in states if state is not None and state.fields == seen]
        if not fits:
            if not self._may_be_lost(each) and not self.found.main.lacks(version):
                expected = self.found.main.state(version)
                raise Broken("G9", f"{each} saw {seen} as version {version} of {self.found.id}, which {expected} is")
            return
        if not self._may_be_lost(each):
            self._judge_brief(each, brief, [state.brief for _, state in fits])
        # While two servers accept writes, a client that reaches only the old one reads its data.
        if fits[0][0] is self.found.main and not _overlaps(each, self.befell.takeovers):
            self._judge_age(each, version)

    def judge_part(self, each: Outcome, seen: dict[str, Any]) -> None:
        """Check that messages, or an item, belong to a version that was new enough. Raises Broken."""
        ((name, value),) = seen.items()
        if name == "messages" and (doubled := [text for text, count in Counter(value).items() if count > 1]):
            raise Broken("G3", f"{each} saw {doubled} twice")
        fits = [
            (line, line.base + at)
            for line in self.found.lines()
            for at, state in enumerate(line.states)
            if state is not None
            if name != "messages" or state.messages is not None
            if value == (state.messages if name == "messages" else state.items.get((COLLECTION, name)))
        ]
        if not fits and not self._may_be_lost(each) and not self.found.main.lacks(0):
            raise Broken("G9", f"{each} saw {name} {value}, which no version of {self.found.id} has")
        is_known = not self._may_be_lost(each) and not self.found.main.lacks(0)
        if fits and is_known and all(line is self.found.main for line, _ in fits):
            self._judge_age(each, fits[-1][1])

    def _judge_age(self, each: Outcome, version: int) -> None:
        since = each.began if each.fresh else each.began - self.befell.staleness
        for writer, (at, *_) in self.main.items():
            if at > version and all(
                other.ended < since and other.state == ACKNOWLEDGED for other in self.writes.get(writer, (each,))
            ):
                raise Broken("G10", f"{each} saw version {version}, though {writer} was acknowledged as {at} before")

    def _judge_brief(self, each: Outcome, brief: str | None, held: Sequence[str | None]) -> None:
        """Check that an expiring field was present for exactly its lifetime. `held`: the values that may be there."""
        writer = brief if brief is not None else held[0] if len(held) == 1 else None
        tries = self.writes.get(writer or "", ())
        earliest = min((other.began for other in tries), default=math.inf) + BRIEF_SECONDS
        # A rollback leaves fields alone that expired by its caller's clock; by another clock they may still be there.
        if brief is not None and brief not in held and each.ended < earliest - _SLACK:
            raise Broken("G9", f"{each} saw {BRIEF}={brief}, and it was one of {held}")
        if not tries:
            return
        latest = max(other.ended for other in tries) + BRIEF_SECONDS
        if brief is not None and each.began > latest + _SLACK:
            raise Broken("expiry", f"{each} saw {BRIEF}={brief}, which was to end by {latest:.3f}")
        if brief is None and each.ended < earliest - _SLACK:
            raise Broken("expiry", f"{each} did not see {BRIEF}={writer}, which was to last until {earliest:.3f}")


def _served(line: Line) -> list[tuple[str, Change]]:
    """The inputs that turns served, by the writers that posted them, with the turns' changes, in order."""
    turns = [change for change in line.changes if change.kind == "turn" and "served" in change.set]
    return [(str(message.content), change) for change in turns for message in change.appended]


def served(line: Line) -> dict[str, Change]:
    """The changes that served inputs, by the writers that posted these; nothing if some changes are unknown."""
    wakes = {change.actor for change in line.changes if change.kind == "wake"}
    return {} if line.lacks(0) else {writer: change for writer, change in _served(line) if writer not in wakes}


def judge_inbox(found: Found, waiting: Iterable[Input]) -> None:
    """Each input was served by one committed turn, in the order of acceptance, or waits."""
    main = found.main
    if main.lacks(0):
        return
    posted = [change.actor for change in main.changes if change.kind == "post"]
    wakes = {change.actor for change in main.changes if change.kind == "wake"}
    known = [posted for posted, _ in _served(main) if posted not in wakes]
    left = [each.message.content for each in waiting]
    if [*known, *left] != posted:
        raise Broken("inbox", f"{found.id}: {posted} were posted, {known} served, and {left} wait")


def judge_work(found: Found, waiting: Iterable[Input], names: Mapping[str, str]) -> None:
    """Workers have served all inputs and wakes, each once; `names`: those of the wakes, by their writers."""
    main = found.main
    if left := [each.message.content for each in waiting]:
        raise Broken("G12", f"{found.id}: nobody serves {left}")
    if main.lacks(0):
        return
    times = Counter(each for each, _ in _served(main))
    wakes = [change.actor for change in main.changes if change.kind == "wake"]
    last = {names[writer]: writer for writer in wakes}
    for writer in wakes:
        if times[writer] > 1 or (last[names[writer]] == writer and not times[writer]):
            raise Broken("G12", f"{found.id}: the wake of {writer} was served {times[writer]} times; {wakes} were set")


def judge_followed(request: str, parts: Sequence[OutputPart], change: Change) -> None:
    """A follower of an input is shown the end of the turn that served it, and before that no chunk of another turn."""
    shown: list[Any] = []
    for part in parts:
        # After Truncated, the end may be that of an attempt whose chunks were lost.
        if isinstance(part, Restarted | Failed | Abandoned | Truncated):
            shown.clear()
        elif isinstance(part, Chunk):
            shown.append(part.data)
        elif isinstance(part, Ended) and (part.version != change.version or set(shown) - {change.set["served"]}):
            text = f"{request} was served as version {change.version} by {change.set['served']}"
            raise Broken("output", f"{text}, and its follower was shown {parts}")


def judge_leases(outcomes: Sequence[Outcome], befell: Befell) -> None:
    """A lease is lost only through a fault that can take one. Raises Broken."""
    for each in outcomes:
        if each.error.startswith(("Fenced", "Interrupted")) and not befell.may_lose_lease(each):
            raise Broken("G6", f"{each}, and nothing can have taken it")


def judge_spared(outcomes: Sequence[Outcome], homes: Mapping[str, str], harms: Sequence[Harm]) -> None:
    """A fault of one node of a cluster does not delay the clients of the other nodes. Raises Broken.

    `homes`: the node of each record, for the whole run.
    """
    harmed = {harm.group for harm in harms}
    if "" in harmed:
        return
    for each in outcomes:
        is_spared = each.operation.kind != "fork" and each.records and not each.died
        if is_spared and not any(homes[record] in harmed for record in each.records):
            told = each.error.startswith(("Fenced", "Interrupted", "WarmUnavailable", "RecoveryInProgress"))
            if told or each.ended - each.began > _HELD_UP:
                raise Broken("progress", f"{each}, and nothing befell the node that has {each.records}")


def judge_versions(given: Iterable[tuple[str, str, int, str]]) -> None:
    """Within an epoch, a single server never assigns a version twice. `given`: record, epoch, version, event."""
    first: dict[tuple[str, str, int], str] = {}
    for record, epoch, version, event in given:
        if first.setdefault((record, epoch, version), event) != event:
            raise Broken("G1", f"{record}: version {version} was given twice under epoch {epoch}")


def judge_errors(outcomes: Sequence[Outcome]) -> None:
    """The only configuration error is that a server does not fsync; no client sees another one. Raises Broken."""
    for each in outcomes:
        if "durability 'fsynced' cannot be kept" not in each.error and each.error.startswith(
            ("ConfigurationError", "NotPermitted")
        ):
            raise Broken("errors", f"{each}")


def judge_erased(rest: bytes, outcomes: Sequence[Outcome]) -> None:
    """Erased text is found nowhere. `rest`: everything that SQL and Redis hold. Raises Broken."""
    records: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if each.operation.kind in PRIVATE:
            records.setdefault(private(each.operation), []).append(each)
    for id, tries in records.items():
        for erased in tries:
            # An operation that ended after the erasure began may have written new data.
            begun = [each for each in tries if each.operation.kind == "keep own" and each.state != REFUSED]
            is_anew = any(each.ended > erased.began for each in begun)
            if erased.state == ACKNOWLEDGED and erased.left and not is_anew:
                raise Broken("erasure", f"{erased}, and there were {erased.left}")
            if erased.operation.kind in ERASURES and erased.state == ACKNOWLEDGED:
                before = [each for each in tries if each.ended < erased.began]
                for each in before:
                    if secret(each.writer).encode() in rest:
                        raise Broken("erasure", f"{erased}, and what {each} is still there")
                # The name stays in the event of the erasure. Reading the record again brings back its tombstone.
                alone = len(before) == len(tries) - 1 and all(each.operation.kind not in ERASURES for each in before)
                if alone and re.search(rf":r:session:{id}(?!\d)".encode(), rest):
                    raise Broken("erasure", f"{erased}, and Redis still has {id}")


async def judge_short(store: AsyncStateStore, outcomes: Sequence[Outcome], befell: Befell) -> None:
    """Sessions with a lifetime have ended, and not too early. Raises Broken."""
    writes = [each for each in outcomes if each.operation.kind == "write short"]
    for id in dict.fromkeys(short(each.operation) for each in writes):
        session = store.session(id)
        changes = await session.history()
        actors = {change.actor for change in changes}
        branches = await store.admin.branches(session.id)
        for each in writes:
            lost = short(each.operation) == id and each.state == ACKNOWLEDGED and each.writer not in actors
            if lost and not any(each.writer in branch.actors for branch in branches):
                judge_loss(each, befell)
        for before, change in pairwise(changes):
            if change.kind == "expire" and change.time - before.time < IDLE - _SLACK:
                raise Broken("expiry", f"{id} ended {change.time - before.time:.3f} s after {before}")
        if changes and changes[-1].kind != "expire":
            raise Broken("expiry", f"{id} has not ended: {[change.kind for change in changes]}")
        if await session.exists(fresh=True):
            raise Broken("expiry", f"{id} has ended, and is there")


async def judge_purged(store: AsyncStateStore, found: Found) -> None:
    """A purge leaves the rest of a record unchanged. Raises Broken."""
    session = store.session(found.id)
    await store.admin.purge(keep_changes=_KEPT)
    changes = await session.history()
    if changes != found.main.changes[-len(changes) :] or (
        not found.main.lacks(0) and len(changes) < min(_KEPT, len(found.main.changes))
    ):
        raise Broken("G9", f"{found.id}: a purge left {changes} of {found.main.changes[-_KEPT:]}")
    messages = _said(await session.messages(fresh=True))
    if found.state.messages not in (None, messages) or lasting(await session.view(fresh=True)) != found.state.fields:
        raise Broken("G9", f"{found.id}: a purge left {messages} of {found.state}")
    for change in changes:
        state = found.main.state(change.version)
        if state is not None and state.messages is not None:
            past = await session.at(version=change.version)
            if (lasting(past.fields), _said(past.messages)) != (state.fields, state.messages):
                raise Broken("G9", f"{found.id}: after a purge version {change.version} is {past}, and it was {state}")
