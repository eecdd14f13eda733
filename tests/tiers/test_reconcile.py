"""What of an epoch that ended is put back, and what is a branch: over whatever losses hypothesis thinks of."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_state.cold.values import Archived, Commits
from distributed_state.tiers import reconcile as reconciling
from distributed_state.tiers.reconcile import Reconciled, reconcile
from distributed_state.values.journal import JournalEntry, pack, unpack

pytestmark = pytest.mark.unit

EPOCH = "3-now"


def entry(history: str, offset: int, record: str, version: int, event: int = 0) -> JournalEntry:
    steps = [(b"s", b"by", history.encode())]
    if event:
        steps.append((b"e", b"%d some.type %b" % (event, record.encode()), b"{}"))
    name = f"{history}.{offset}.0"
    return JournalEntry(offset, name, record, version, 1000 + offset, "set", "", 0, pack(steps), 0)


@dataclass
class Server:
    """A Redis server, which continues the numbers of the data that it has."""

    entries: list[JournalEntry] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def commit(self, history: str, record: str, with_event: bool) -> None:
        self.events += with_event
        self.versions[record] += 1
        event = self.events if with_event else 0
        self.entries.append(entry(history, len(self.entries) + 1, record, self.versions[record], event))

    def older(self, count: int) -> Server:
        """As it was after so many commits."""
        server = Server(list(self.entries[:count]))
        for each in server.entries:
            server.versions[each.record] = each.version
            server.events = max([server.events, *events_of(each)])
        return server


def events_of(each: JournalEntry) -> list[int]:
    return [int(op.name.split(b" ")[0]) for op in unpack(each.data) if op.kind == b"e"]


def known_of(archived: list[JournalEntry], others: list[JournalEntry]) -> Commits:
    heads = {each.record: Archived(each.version, EPOCH, each.offset, each.event) for each in archived}
    held = {each.event for each in archived}
    lacking = {each.event for each in others} - held
    return Commits(lacking, heads, max([0, *(number for each in archived for number in events_of(each))]))


commits = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=14)


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[JournalEntry], list[JournalEntry], list[JournalEntry]]:
    """What SQL has, what the surviving journal has, and what living writers remember."""
    first = Server()
    for record, with_event in draw(commits):
        first.commit("A", record, with_event)
    second = first.older(draw(st.integers(0, len(first.entries))))
    for record, with_event in draw(commits):
        second.commit("B", record, with_event)
    archives = draw(st.sampled_from([first, second]))
    archived = archives.entries[: draw(st.integers(0, len(archives.entries)))]
    survivor = draw(st.sampled_from([first, second, Server()]))
    tail = survivor.entries[: draw(st.integers(0, len(survivor.entries)))]
    everything = {each.event: each for server in (first, second) for each in server.entries}
    writers = draw(st.sets(st.sampled_from(sorted(everything)))) if everything else set()
    return archived, tail, [everything[event] for event in sorted(writers)]


def run(archived: list[JournalEntry], tail: list[JournalEntry], unarchived: list[JournalEntry]) -> Reconciled:
    return reconcile(EPOCH, len(archived), known_of(archived, tail + unarchived), tail, unarchived)


@given(losses())
def test_nothing_is_dropped_and_nothing_stands_twice(loss: tuple[list[JournalEntry], ...]) -> None:
    archived, tail, unarchived = loss
    found = run(archived, tail, unarchived)
    lacking = {each.event for each in tail + unarchived} - {each.event for each in archived}
    given_out = [each.event for each in found.continued + found.diverged]
    assert sorted(given_out) == sorted(lacking)


@given(losses())
def test_each_record_goes_on_without_a_gap_and_the_partition_in_order(loss: tuple[list[JournalEntry], ...]) -> None:
    archived, tail, unarchived = loss
    versions = Counter({each.record: each.version for each in archived})
    offset = 0
    for each in run(archived, tail, unarchived).continued:
        assert each.version == versions[each.record] + 1
        versions[each.record] = each.version
        assert each.offset >= offset
        offset = each.offset


@given(losses(), st.randoms(use_true_random=False))
def test_every_replica_chooses_alike(loss: tuple[list[JournalEntry], ...], chance: random.Random) -> None:
    archived, tail, unarchived = loss
    first = run(archived, tail, unarchived)
    chance.shuffle(unarchived)
    chance.shuffle(tail)
    assert run(archived, tail, unarchived + unarchived[:3]) == first


@given(losses())
def test_events_have_a_number_each(loss: tuple[list[JournalEntry], ...]) -> None:
    archived, tail, unarchived = loss
    numbers = [number for each in archived + run(archived, tail, unarchived).continued for number in events_of(each)]
    assert len(numbers) == len(set(numbers))


@given(commits, st.data())
def test_of_one_history_all_that_is_known_without_a_gap_is_put_back(
    made: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """A failover to a replica that was behind: whatever its writers remember, as it was, with its events' numbers."""
    server = Server()
    for record, with_event in made:
        server.commit("A", record, with_event)
    archived = server.entries[: data.draw(st.integers(0, len(server.entries)))]
    tail = server.entries[: data.draw(st.integers(0, len(server.entries)))]
    dead = (
        data.draw(st.sets(st.sampled_from(sorted(each.event for each in server.entries)))) if server.entries else set()
    )
    unarchived = [each for each in server.entries if each.event not in dead]
    found = run(archived, tail, unarchived)
    alive = {each.event for each in archived + tail + unarchived}
    broken = set[str]()
    expected = []
    for each in server.entries:
        if each.event not in alive:
            broken.add(each.record)
        elif each not in archived and each.record not in broken:
            expected.append(each)
    assert found.continued == expected
    if not dead:
        assert not found.diverged


@given(losses())
def test_what_the_journal_continues_is_put_back_before_what_writers_remember(
    loss: tuple[list[JournalEntry], ...],
) -> None:
    archived, tail, unarchived = loss
    if tail[: len(archived)] == archived:
        continued = {each.event for each in run(archived, tail, unarchived).continued}
        assert {each.event for each in tail[len(archived) :]} <= continued


@given(commits, commits, commits)
def test_histories_are_never_mixed_within_a_record(
    common: list[tuple[str, bool]], one: list[tuple[str, bool]], other: list[tuple[str, bool]]
) -> None:
    """An older Redis survived and counted on; the writers of what it lost remember all of it."""
    first = Server()
    for record, with_event in common:
        first.commit("C", record, with_event)
    second = first.older(len(first.entries))
    for record, with_event in one:
        first.commit("A", record, with_event)
    for record, with_event in other:
        second.commit("B", record, with_event)
    found = run(first.entries[: len(common)], second.entries, first.entries)
    for record in "abc":
        histories = {each.event[0] for each in found.continued if each.record == record}
        assert len(histories - {"C"}) < 2
        if any(each.event[0] == "B" and each.record == record for each in second.entries):
            assert "A" not in histories


@given(commits, commits, commits, st.data())
def test_of_two_histories_that_only_writers_know_none_goes_on_as_the_other(
    common: list[tuple[str, bool]], one: list[tuple[str, bool]], other: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """No journal survived. At most one entry of a record is put back beyond the point where they part."""
    first = Server()
    for record, with_event in common:
        first.commit("C", record, with_event)
    second = first.older(len(first.entries))
    for record, with_event in one:
        first.commit("A", record, with_event)
    for record, with_event in other:
        second.commit("B", record, with_event)
    unarchived = data.draw(st.permutations(first.entries + second.entries[len(common) :]))
    found = run(first.entries[: len(common)], [], list(unarchived))
    for record in "abc":
        put_back = [each for each in found.continued if each.record == record]
        assert len({each.event[0] for each in put_back}) < 2
    if one and other:
        assert all(count == 1 for count in Counter(each.record for each in found.continued).values())


def test_a_commit_of_another_history_does_not_count_on_from_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for all of the above: by the numbers alone it would fit."""
    base, theirs = entry("C", 1, "a", 1), entry("B", 2, "a", 2)
    lost, after = entry("A", 2, "a", 2), entry("A", 3, "a", 3)
    found = reconcile(EPOCH, 1, known_of([base], [theirs, lost, after]), [theirs], [lost, after])
    assert (found.continued, found.diverged) == ([theirs], [lost, after])
    # Nobody remembers what the other history had there: only another record's entry shows that there was one.
    elsewhere = entry("A", 2, "b", 1)
    found = reconcile(EPOCH, 1, known_of([base], [theirs, elsewhere, after]), [theirs], [elsewhere, after])
    assert (found.continued, found.diverged) == ([elsewhere, theirs], [after])
    monkeypatch.setattr(reconciling, "_fork", lambda *_: math.inf)
    found = reconcile(EPOCH, 1, known_of([base], [theirs, elsewhere, after]), [theirs], [elsewhere, after])
    assert after in found.continued


def test_events_alone_are_put_back() -> None:
    alone = replace(entry("A", 1, "", 0, event=1), kind="emit")
    found = reconcile(EPOCH, 0, known_of([], [alone]), [alone], [])
    assert found == Reconciled([alone], [])
