"""Items in SQL. Law: a model, a dict for each version, says what each read should give, whatever was removed since."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from distributed_state.cold import erasure, record_items, tables
from distributed_state.cold.store import ColdStore
from distributed_state.errors import InvalidValue, UnknownOperation
from distributed_state.values import codec
from distributed_state.values.journal import KINDS, State, pack, unpack
from distributed_state.values.model import ITEMS, OWNER, PARENT
from tests.contracts.test_cold_compaction import compact
from tests.journals import Journal, Step, put, rows

LATER = 10**12
A, B, C = "session:a", "session:b", "session:c"
# Nothing of text: a NUL, which ends the collection's name; the byte behind all others; one that no alphabet has.
KEYS = (b"", b"a", b"a\0b", b"b\xff", b"b\xff\xff", b"\xff", b"caf\xe9")
COLLECTIONS = (b"x", b"y" * 64)
Items = dict[tuple[bytes, bytes], bytes]


def put_item(key: bytes, frame: bytes, collection: bytes = b"x") -> Step:
    return (b"p", collection + b"\0" + key, frame)


def delete_item(key: bytes, collection: bytes = b"x") -> Step:
    return (b"q", collection + b"\0" + key, b"")


def read(store: ColdStore, record: str, version: int, collection: bytes = b"x", prefix: bytes = b"") -> Any:
    """The items of a collection at a version, by key."""
    with store.database.read(store.namespace) as sql:
        return read_in(sql, record, version, collection, prefix)


def read_in(sql: Any, record: str, version: int, collection: bytes, prefix: bytes) -> Any:
    wanted = record_items.Range(collection, prefix)
    found = record_items.page(sql, record, version, wanted, 1000, 10**9)
    assert found is not None
    return {key: row.frame for key, row in found.rows}


def kept(store: ColdStore, record: str = A) -> list[tuple[bytes, int, bytes]]:
    """The rows of a record: key, version and frame."""
    return sorted((row.key, row.version, row.data) for row in rows(store, tables.items, record=record))


@dataclass
class Model:
    """What the items of each record are at each of its versions."""

    journal: Journal
    past: dict[str, dict[int, Items]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)  # those that were deleted

    def commit(self, record: str, *steps: Step, **other: Any) -> None:
        entry = self.journal.commit(record, *steps, **other)
        self._note(record, entry.version, entry.data)

    def _note(self, record: str, version: int, data: bytes, below: Items | None = None) -> None:
        before = self.past.setdefault(record, {})
        now = dict(before.get(version - 1, {}) if below is None else below)
        for kind, name, value in unpack(data):
            if kind in (b"p", b"q"):
                collection, _, key = name.partition(b"\0")
                now.pop((collection, key), None)
                if kind == b"p":
                    now[collection, key] = value
        before[version] = now

    def fork(self, source: str, record: str, version: int) -> None:
        entry = self.journal.fork(source, record, version)
        self._note(record, entry.version, entry.data, self.past[source][version])

    def layer(self, record: str, shown: int, *steps: Step) -> None:
        """From now on it shows the items of this version, and what these steps put upon them; 0: none."""
        version = self.journal.states[record].version + 1
        entry = self.journal.commit(record, (b"s", ITEMS, b"%d %d" % (version, shown)), *steps)
        self._note(record, entry.version, entry.data, self.past[record][shown] if shown else {})

    def check(self, most: int = 99) -> None:
        """Compare the versions that can be read, of each record so many at most, and the histories."""
        store = self.journal.store
        for record, past in self.past.items():
            readable = range(store.oldest(record), (store.version(record) or 0) + 1)
            with store.database.read(store.namespace) as sql:
                for version in random.Random(len(past)).sample(readable, min(most, len(readable))):
                    for collection in COLLECTIONS:
                        expected = {key: frame for (where, key), frame in past[version].items() if where == collection}
                        found = read_in(sql, record, version, collection, b"")
                        assert found == expected, (record, version)
            for entry in store.history(record):
                for kind, name, value in unpack(entry.data):
                    if kind == b"p":
                        collection, _, key = name.partition(b"\0")
                        assert past[entry.version][collection, key] == value, (record, entry.version)


@pytest.fixture
def model(journal: Journal) -> Model:
    return Model(journal)


# Archiving


def test_items_are_kept_once_and_read_back_with_their_change(journal: Journal) -> None:
    """`changes` has which items were put, `items` has what they say: a history puts the two together."""
    steps = [put("k", "1"), put_item(b"a\0b", b"frame one"), delete_item(b"gone"), put_item(b"z", b"frame two")]
    entry = journal.commit(A, *steps, messages=1)
    journal.flush()
    (row,) = rows(journal.store, tables.changes)
    assert row.data == pack((*step[:2], b"" if step[0] in b"pm" else step[2]) for step in unpack(entry.data))
    assert kept(journal.store) == [(b"a\0b", 1, b"frame one"), (b"gone", 1, b""), (b"z", 1, b"frame two")]
    assert [each.data for each in journal.store.history(A)] == [entry.data]
    assert [each.data for each in journal.store.history(A, after=0, limit=1)] == [entry.data]


def test_items_of_a_packed_change_are_read_back(journal: Journal) -> None:
    """A block holds changes as their table did."""
    for number in range(12):
        journal.commit(A, put_item(b"%d" % (number % 3), b"frame %d" % number))
    journal.flush()
    before = journal.store.history(A)
    assert compact(journal.store).changes == 11
    assert journal.store.history(A) == before
    (block,) = rows(journal.store, tables.change_blocks)
    assert block.count == 11


def test_of_two_steps_for_one_item_the_last_counts(journal: Journal) -> None:
    """A client sends one. The history of what another one sent is whole all the same."""
    steps = [put_item(b"a", b"first"), put_item(b"a", b"last"), put_item(b"b", b"1"), delete_item(b"b")]
    entry = journal.commit(A, *steps)
    journal.flush()
    assert kept(journal.store) == [(b"a", 1, b"last"), (b"b", 1, b"")]
    assert journal.store.history(A)[0].data == entry.data


@pytest.mark.parametrize(
    "step",
    [
        (b"p", b"no separator", b"frame"),
        (b"p", b"\0key", b"frame"),
        (b"p", b"c" * 65 + b"\0key", b"frame"),
        (b"p", b"x\0" + b"k" * 1025, b"frame"),
        (b"p", b"x\0key", b""),
        (b"q", b"x\0key", b"frame"),
    ],
)
def test_what_is_no_item_is_put_aside(journal: Journal, step: Step) -> None:
    """As any entry that SQL cannot hold. What is as long as it may be is taken, also by an index of PostgreSQL."""
    journal.commit(A, put("k", "1"))
    journal.commit(B, step)
    journal.commit(A, put_item(random.Random(1).randbytes(1024), b"frame", b"\xff" * 64))
    journal.flush()
    (aside,) = journal.store.quarantined()
    assert (aside.record, unpack(aside.data)) == (B, [step])
    assert journal.store.version(A) == 2
    assert len(kept(journal.store)) == 1


def test_items_are_listed_in_the_order_of_bytes_and_by_prefix(model: Model) -> None:
    """The order is the same on each database, whatever its language."""
    for key in KEYS:
        model.commit(A, put_item(key, b"frame"))
    model.journal.flush()
    assert list(read(model.journal.store, A, 99)) == sorted(KEYS)
    for prefix in (b"", b"a", b"b\xff", b"\xff", b"\xff\xff", b"c"):
        assert list(read(model.journal.store, A, 99, prefix=prefix)) == sorted(k for k in KEYS if k.startswith(prefix))


def test_a_new_life_sets_items_aside_with_their_changes(model: Model) -> None:
    """The quarantine has what they said."""
    journal = model.journal
    for number in range(4):
        model.commit(A, put_item(b"a", b"frame %d" % number))
    journal.flush()
    journal.renew()
    journal.states[A] = replace(journal.states[A], version=2, fields=journal.past[A, 2])
    journal.commit(A, put_item(b"b", b"other record"))
    journal.flush()
    assert kept(journal.store) == [(b"a", 1, b"frame 0"), (b"a", 2, b"frame 1"), (b"b", 3, b"other record")]
    assert [unpack(each.data)[0].value for each in journal.store.quarantined()] == [b"frame 2", b"frame 3"]


def test_a_branch_keeps_what_its_items_say(journal: Journal) -> None:
    """No other table has them."""
    journal.commit(A, put("k", "1"))
    journal.flush()
    lost = journal.commit(A, put_item(b"a", b"frame"))
    journal.store.branches.keep(0, journal.epoch, [lost], "test")
    (branch,) = journal.store.branches.of(A)
    assert [each.data for each in journal.store.branches.entries(A, branch.id)] == [lost.data]


# Steps that only a newer release knows


def test_an_entry_with_an_unknown_step_is_not_passed(journal: Journal) -> None:
    """Nothing moves, and nothing is put aside: also if it holds what no database could, and of other partitions."""
    journal.commit(A, put("k", "1"))
    journal.flush()
    journal.commit(A, put("k", "2"))
    journal.commit(A, data=pack([(b"y", b"", b"layer"), (b"m", b"no number", b"")]))
    journal.commit(A, put("k", "4"))
    other = Journal(journal.store, partition=1)
    other.commit(B, put("k", "1"))
    before = journal.store.cursors()
    with pytest.raises(UnknownOperation, match=r"entry 3 of partition 0 has an operation b'y'") as caught:
        journal.store.archive([other.batch(), journal.batch()])
    assert (caught.value.partition, caught.value.offset, caught.value.kind) == (0, 3, b"y")
    assert journal.store.cursors() == before
    assert (journal.store.version(A), journal.store.version(B)) == (1, None)
    assert journal.store.quarantined() == []


def test_an_archiver_that_does_not_look_at_steps_passes_them(journal: Journal, monkeypatch: Any) -> None:
    """Without the guard the cursor moves over them."""
    monkeypatch.setattr("distributed_state.cold.record_index.KINDS", KINDS | {b"y"})
    journal.commit(A, (b"y", b"", b"layer"))
    assert journal.flush() == {0}


def test_a_branch_keeps_steps_that_nobody_here_knows(journal: Journal) -> None:
    """For a worker that does: they are kept as they are."""
    journal.commit(A, put("k", "1"))
    journal.flush()
    lost = journal.commit(A, (b"y", b"", b"layer"))
    journal.store.branches.keep(0, journal.epoch, [lost], "test")
    (branch,) = journal.store.branches.of(A)
    assert [each.data for each in journal.store.branches.entries(A, branch.id)] == [lost.data]
    assert journal.store.quarantined() == []


def test_an_import_refuses_steps_that_nobody_here_knows(journal: Journal) -> None:
    entry = journal.commit(A, (b"y", b"", b"layer"))
    with pytest.raises(InvalidValue, match="b'y'"):
        journal.store.adopt(A, partition=0, epoch=journal.epoch, base=None, base_messages=[], entries=[entry])


# Retention


def fill(model: Model, record: str = A, commits: int = 4, key: bytes = b"a") -> None:
    for number in range(commits):
        model.commit(record, put_item(key, b"%b frame %d" % (record.encode(), number)))
    model.journal.flush()


def test_a_purge_leaves_of_each_item_the_newest_row_at_its_base(model: Model) -> None:
    fill(model, commits=3)
    fill(model, commits=1, key=b"b")
    cutoff = model.journal.now + 1
    fill(model, commits=2)
    model.journal.store.purge(cutoff)
    assert model.journal.store.oldest(A) == 4
    assert [row[:2] for row in kept(model.journal.store)] == [(b"a", 3), (b"a", 5), (b"a", 6), (b"b", 4)]
    model.check()


def test_a_deleted_item_leaves_nothing_behind(model: Model) -> None:
    """Nor does the row that says so, once nothing is left that it hides."""
    fill(model, commits=3)
    model.commit(A, delete_item(b"a"))
    model.commit(A, put("k", "1"))
    model.journal.flush()
    model.journal.store.purge(0, keep=2)
    assert kept(model.journal.store)[-1][1:] == (4, b"")  # version 3 can be read still, which has it
    model.check()
    model.journal.store.purge(LATER)
    assert kept(model.journal.store) == []
    model.check()


def test_what_a_rollback_brings_back_lies_below_what_is_put_from_then_on(model: Model) -> None:
    fill(model, commits=2)
    model.commit(A, put_item(b"b", b"b"))
    model.layer(A, 1)
    model.commit(A, put_item(b"c", b"c"))
    model.commit(A, delete_item(b"a"))
    model.layer(A, 5, put_item(b"d", b"d"))
    model.layer(A, 2)
    model.fork(A, B, 7)
    model.layer(A, 0)
    model.commit(A, put_item(b"e", b"e"))
    model.journal.flush()
    model.check()
    model.journal.store.purge(0, keep=3)
    model.check()
    model.journal.store.purge(LATER)
    model.check()
    assert [row[0] for row in kept(model.journal.store)] == [b"a", b"c", b"d", b"e"], (
        "what the fork shows, and the last"
    )
    erase(model.journal.store, A)
    del model.past[A]
    model.check()


def test_a_thousand_rollbacks_are_no_obstacle_to_a_purge(model: Model) -> None:
    """Each leaves a span of versions; SQLite takes a thousand conditions at most."""
    fill(model, commits=3)
    for _ in range(1200):
        model.layer(A, 2)
    model.journal.flush()
    model.journal.store.purge(0, keep=1100)
    assert [row[:2] for row in kept(model.journal.store)] == [(b"a", 2)]
    model.check(most=5)


@contextmanager
def statements() -> Iterator[list[str]]:
    """What databases are asked in the block."""
    asked: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_layers_upon_layers_are_read_in_one_statement(model: Model) -> None:
    """A step back after each step leaves a layer upon all the others; those of a source are asked at once."""
    fill(model, commits=2)
    counts = []
    for _ in range(2):
        for number in range(15):
            version = model.journal.states[A].version
            model.commit(A, put_item(b"c", b"undone %d" % number))
            model.layer(A, version, put_item(b"b", b"%d" % number))
        model.journal.flush()
        version = model.journal.states[A].version
        with statements() as asked:
            found = model.journal.store.items(A, version, [b"x\0a", b"x\0b", b"x\0c"], [b"x"])
            read(model.journal.store, A, version)
        assert found is not None
        assert {name: row.frame for name, row in found.rows.items()} == {b"x\0a": b"session:a frame 1", b"x\0b": b"14"}
        assert found.greatest == {b"x": b"=c"}
        counts.append(len(asked))
    assert counts[0] == counts[1]
    model.check()


def test_what_was_deleted_is_passed_over_in_few_statements(model: Model) -> None:
    """Who asks for one item does not ask for each of those that are not there any more."""
    keys = [b"k%03d" % number for number in range(300)]
    model.commit(A, *(put_item(key, b"frame") for key in keys))
    model.commit(A, *(delete_item(key) for key in keys))
    model.commit(A, put_item(b"l", b"frame"))
    model.journal.flush()
    with statements() as asked:
        found = model.journal.store.list_items(A, None, record_items.Range(b"x"), 1, 1000)
    assert [key for key, _ in found.rows] == [b"l"]
    assert len(asked) < 20


def test_what_was_cleared_goes_with_a_purge(model: Model) -> None:
    fill(model, commits=3)
    model.layer(A, 0)
    model.commit(A, put_item(b"b", b"b"))
    model.commit(A, put("k", "1"))
    model.journal.flush()
    model.journal.store.purge(0, keep=2)
    model.check()
    model.journal.store.purge(LATER)
    assert [row[:2] for row in kept(model.journal.store)] == [(b"b", 5)]
    model.check()


def test_a_record_that_was_deleted_loses_all(model: Model) -> None:
    fill(model)
    model.journal.delete(A)
    model.journal.flush()
    model.journal.store.purge(LATER)
    assert kept(model.journal.store) == []


def test_a_purge_leaves_what_a_fork_shows(model: Model) -> None:
    fill(model, commits=3)
    model.commit(A, delete_item(b"a"))
    fill(model, commits=1, key=b"b")
    model.fork(A, B, 2)
    model.fork(A, C, 4)
    model.commit(A, put("k", "1"))
    model.journal.flush()
    model.journal.store.purge(LATER)
    # The deletion hides version 2 from what shows version 4 of it.
    assert [row[:2] for row in kept(model.journal.store)] == [(b"a", 2), (b"a", 4), (b"b", 5)]
    model.check()


def test_without_the_ends_of_forks_a_purge_takes_what_they_show(model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(record_items, "layer_ends", lambda *_: {})
    with pytest.raises(AssertionError):
        test_a_purge_leaves_what_a_fork_shows(model)
    with pytest.raises(AssertionError):
        model.check()


def erase(store: ColdStore, record: str) -> None:
    store.request(record)
    store.erase([record])


def remove(journal: Journal, record: str, how: str) -> None:
    """Take all rows of a record: it is erased, or purged as it was deleted."""
    if how == "erased":
        erase(journal.store, record)
    else:
        journal.delete(record)
        journal.flush()
        journal.store.purge(LATER)


@pytest.mark.parametrize("how", ["erased", "purged"])
def test_forks_are_handed_what_they_show_of_a_record_that_goes(model: Model, how: str) -> None:
    """Under the name of who wrote it, under which it is encrypted. What the source did since is not theirs."""
    journal = model.journal
    fill(model, commits=2)
    fill(model, commits=2, key=b"b")
    model.commit(A, delete_item(b"b"))
    model.fork(A, B, 4)
    model.fork(A, C, 5)
    fill(model, B, commits=1)
    remove(journal, A, how)
    del model.past[A]
    assert [row for row in rows(journal.store, tables.items) if row.record not in _keys(journal, B, C)] == []
    handed = [row for row in rows(journal.store, tables.items, record=B) if row.version == 0]
    # What the fork had put anew goes in the same purge.
    names = [b"a", b"b"] if how == "erased" else [b"b"]
    assert sorted((row.key, row.origin, row.data[-1:]) for row in handed) == [(key, A, b"1") for key in names]
    assert rows(journal.store, tables.layers) == []
    model.check()
    journal.store.purge(LATER)
    model.check()
    assert [row[:2] for row in kept(journal.store, B)] == [(b"a", 2), (b"b", 0)]
    assert [row[:2] for row in kept(journal.store, C)] == [(b"a", 0)]


def _keys(journal: Journal, *names: str) -> set[int]:
    found = rows(journal.store, tables.records)
    return {row.key for row in found if row.record in names}


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_a_fork_of_a_fork_keeps_what_it_shows_whichever_goes_first(model: Model, order: tuple[str, str]) -> None:
    """What the nearer one deleted does not come back from the one below it."""
    journal = model.journal
    for key in (b"a", b"b", b"c"):
        fill(model, commits=1, key=key)
    model.fork(A, B, 3)
    model.commit(B, delete_item(b"a"))
    model.commit(B, put_item(b"b", b"of the fork"))
    journal.flush()
    model.fork(B, C, 3)
    model.commit(C, delete_item(b"c"))
    journal.flush()
    for name in order:
        erase(journal.store, name)
        del model.past[name]
        model.check()
        journal.store.purge(LATER)
        model.check()
    model.commit(C, put("k", "1"))
    journal.flush()
    journal.store.purge(LATER)
    model.check()
    assert [(row.key, row.origin) for row in rows(journal.store, tables.items)] == [(b"b", B)]


def test_a_fork_that_is_handed_nothing_loses_its_items(model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(erasure, "_hand_down_items", lambda *_: None)
    fill(model)
    model.fork(A, B, 2)
    model.journal.flush()
    erase(model.journal.store, A)
    del model.past[A]
    with pytest.raises(AssertionError):
        model.check()


def test_that_an_item_was_deleted_is_kept_where_something_lies_below(model: Model, monkeypatch: Any) -> None:
    """Else what the source says of it would be shown again."""

    def run() -> None:
        fill(model)
        model.fork(A, B, 2)
        model.commit(B, delete_item(b"a"))
        model.commit(B, put("k", "1"))
        model.journal.flush()
        model.journal.store.purge(LATER)

    run()
    model.check()
    monkeypatch.setattr(record_items, "layered", lambda *_: set())
    model.commit(B, put("k", "2"))
    model.journal.flush()
    model.journal.store.purge(LATER)
    with pytest.raises(AssertionError):
        model.check()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_fork_that_is_erased_meanwhile_is_handed_nothing(model: Model) -> None:
    """Its rows are gone by then, and what came after them would stay for good."""
    store = model.journal.store
    fill(model)
    model.fork(A, B, 2)
    model.journal.flush()
    store.request(B)
    store.request(A)
    other = threading.Thread(target=store.erase, args=([A],))
    (key,) = _keys(model.journal, B)
    with store.database.write(store.namespace) as sql:
        erasure.erase(sql, [B])
        other.start()
        deadline = time.monotonic() + 10
        while other.is_alive() and not _waits(store):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    other.join()
    with store.database.read() as connection:
        left = connection.execute(tables.items.select().where(tables.items.c.record == key)).all()
    assert left == []


def _waits(store: ColdStore) -> bool:
    """Whether a transaction waits for another one."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with store.database.read() as connection:
        return bool(connection.execute(text(query)).scalar())


def test_a_fork_of_what_has_no_items_costs_no_row(journal: Journal) -> None:
    """Else a line of a thousand forks would have half a million."""
    journal.commit(A, put("k", "1"), messages=2)
    journal.fork(A, B)
    journal.flush()
    assert rows(journal.store, tables.layers) == []


def test_who_shows_only_items_of_a_user_is_forgotten_with_that(model: Model) -> None:
    """Also where what lay between the two is gone, which is all that names it as a fork."""
    journal = model.journal
    journal.commit(A, (b"s", OWNER, b"u"))
    model.past[A] = {1: {}}
    fill(model)
    model.fork(A, B, 3)
    model.commit(B, (b"d", OWNER, b""))
    journal.flush()
    model.fork(B, C, 2)
    journal.flush()
    erase(journal.store, B)
    assert journal.store.owned("u") == [A, C]


def test_a_parent_at_a_version_that_no_column_holds_is_put_aside(journal: Journal) -> None:
    """It would stop the whole transaction, each time."""
    journal.commit(A, put_item(b"a", b"frame"))
    journal.commit(B, (b"s", PARENT, f"{A}@{2**63}".encode()))
    journal.flush()
    assert [each.record for each in journal.store.quarantined()] == [B]
    assert journal.store.version(A) == 1


def test_a_record_that_names_a_parent_in_a_file_shows_nothing_of_it(model: Model) -> None:
    """Anybody may write a file: it names a record of another user, which is then erased."""
    journal = model.journal
    fill(model)
    base = State("elsewhere", 7, {PARENT: f"{A}@4".encode()})
    entry = replace(journal.commit(B, put("k", "1")), version=8)
    journal.pending.clear()
    journal.offset -= 1
    journal.store.adopt(B, partition=0, epoch=journal.epoch, base=base, base_messages=[], entries=[entry])
    erase(journal.store, A)
    assert read(journal.store, B, 99) == {}
    assert rows(journal.store, tables.items) == []


def test_an_imported_change_brings_its_items(journal: Journal) -> None:
    """As it brings its messages."""
    entry = journal.commit(A, put_item(b"a", b"frame"))
    journal.pending.clear()
    journal.store.adopt(A, partition=0, epoch=journal.epoch, base=None, base_messages=[], entries=[entry])
    assert kept(journal.store) == [(b"a", 1, b"frame")]
    assert journal.store.history(A)[0].data == entry.data


# Encryption


def test_items_are_encrypted_anew_under_the_name_of_who_wrote_them(model: Model) -> None:
    """Each once; in quarantine and in branches, too. An empty frame is no value."""
    journal = model.journal
    fill(model, commits=3)
    model.fork(A, B, 3)
    model.commit(B, delete_item(b"b"), put_item(b"c\xff", b"of b"))
    journal.flush()
    lost = journal.commit(B, put_item(b"d", b"lost"))
    journal.store.branches.keep(0, journal.epoch, [lost], "test")
    erase(journal.store, A)
    asked: list[tuple[str, str, bytes]] = []

    def convert(source: str, name: str, data: bytes) -> bytes:
        asked.append((source, name, data))
        return data[::-1]

    assert journal.store.rewrite(B, convert, keep=True) == 3
    names = [codec.item_name(b"x\0" + key) for key in (b"a", b"c\xff", b"d")]
    frames = [f"{A} frame 2".encode(), b"of b", b"lost"]
    assert sorted(asked) == sorted(zip((A, B, B), names, frames, strict=True))
    assert journal.store.rewrite(B, convert, keep=False) == 3
    assert read(journal.store, B, 99) == {b"a": frames[0][::-1], b"c\xff": b"b fo"}
    assert len(set(map(codec.item_name, (*KEYS, b"x\xed\xb2\x80", b"x\x80")))) == len(KEYS) + 2


def test_many_items_are_encrypted_anew_some_at_a_time(model: Model) -> None:
    keys = [b"%03d" % number for number in range(250)]
    for number in range(0, 250, 50):
        model.commit(A, *(put_item(key, b"frame " + key) for key in keys[number : number + 50]))
    model.journal.flush()
    assert model.journal.store.rewrite(A, lambda source, name, data: data[::-1], keep=False) == 250
    assert read(model.journal.store, A, 99) == {key: (b"frame " + key)[::-1] for key in keys}


# All of it


def act(model: Model, chance: random.Random) -> None:
    """One random commit, fork, deletion, erasure, purge or compaction."""
    journal, store = model.journal, model.journal.store
    names = sorted(model.past.keys() - model.dead)
    kind = chance.random()
    if kind < 0.7 or not names:
        record = chance.choice([*names, f"session:{len(journal.states)}"] if len(names) < 6 else names)
        steps: dict[bytes, Step] = {}
        for _ in range(chance.randint(0, 3)):
            key, collection = chance.choice(KEYS[:4]), chance.choice(COLLECTIONS)
            frame = b"%b %d" % (record.encode(), journal.now)
            step = put_item(key, frame, collection) if chance.random() < 0.7 else delete_item(key, collection)
            steps[step[1]] = step
        model.commit(record, put("k", "1"), *steps.values(), messages=chance.randint(0, 1))
        if chance.random() < 0.5:
            journal.flush()
        return
    journal.flush()  # as whoever forks has it archived first
    record = chance.choice(names)
    if kind < 0.76:
        shown = chance.choice([0, chance.randint(store.oldest(record), max(model.past[record]))])
        steps = [put_item(KEYS[0], b"upon it %d" % journal.now)] if chance.random() < 0.3 else []
        model.layer(record, shown, *steps)
    elif kind < 0.84 and len(names) < 9:
        version = chance.randint(store.oldest(record), max(model.past[record]))
        model.fork(record, f"session:{len(journal.states)}", version)
    elif kind < 0.86:
        erase(store, record)
        del model.past[record]
    elif kind < 0.88:
        journal.delete(record)
        journal.flush()
        model.past[record][max(model.past[record]) + 1] = model.past[record][max(model.past[record])]
        model.dead.add(record)
    elif kind < 0.95:
        store.purge(journal.now - chance.randint(-5, 40), keep=chance.choice((None, None, 3)))
        for name in sorted(model.dead & model.past.keys()):
            if not rows(store, tables.snapshots, record=name):
                del model.past[name]
    else:
        compact(store, journal.now - chance.randint(-5, 20))


WIDE = [pytest.param(n, marks=pytest.mark.wide) for n in range(1, 4)]
FULL = [pytest.param(n, marks=pytest.mark.full) for n in range(4, 12)]


@pytest.mark.parametrize("seed", [0, *WIDE, *FULL])
def test_random_schedules_read_as_the_model_says(model: Model, seed: int) -> None:
    """In the end nothing is kept that nobody can ask for."""
    chance = random.Random(seed)
    for number in range(90):
        act(model, chance)
        if number % 10 == 9:
            model.journal.flush()
            model.check(most=4)
    store = model.journal.store
    left = min(model.past.keys() - model.dead)
    for name in model.past.keys() - {left}:
        erase(store, name)
    # A row goes when the base of its record moves on.
    model.past = {left: model.past[left]}
    model.commit(left, put("k", "2"))
    model.journal.flush()
    store.purge(LATER)
    model.check()
    newest = model.past[left][max(model.past[left])]
    left_rows = {
        (row.collection, row.key): row.data for row in sorted(rows(store, tables.items), key=lambda r: r.version)
    }
    if any(row.last < 2**63 - 1 for row in rows(store, tables.layers)):
        # What lies below an own layer stays, also where something was put upon it; and that it was deleted there.
        left_rows = {name: data for name, data in left_rows.items() if name in newest}
    assert left_rows == newest
    assert [row for row in rows(store, tables.layers) if row.source != left] == []
