"""The tables. Law: text is compared byte by byte; what users wrote is bytes; nothing is kept twice.

`records` gives each record a number. What there is many times of a record names it by that: `changes`, `messages` and
`snapshots`. The other tables name it by namespace and text, because they may hold what `records` does not have.
A change has its messages' numbers and its items' names, and `messages` and `items` have what they say.

Migrations create these tables (`migrations/versions`); a test compares the two.

Design: section 9.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, LargeBinary, MetaData, Table, Text

from distributed_state.values.journal import COLLECTION_BYTES
from distributed_state.values.journal import KEY_BYTES as ITEM_KEY_BYTES
from distributed_state.values.model import MAX_ID_BYTES, MAX_PHASE
from distributed_state.values.search import KEY_BYTES, TEXT_BYTES

# Oldest first. A database whose revision is not among them was made by a newer release.
REVISIONS = ("1", "2", "3")
HEAD = REVISIONS[-1]
# Of layouts that came before the first release: what they hold is carried over by `export` and `import`.
UNRELEASED = ("0001", "0002", "0003")

# SQLite compares bytes anyway. PostgreSQL would use the language of the database: slower, and another order there.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")
# The bytes that each text of an index has at most, by the name of its column: an index row of PostgreSQL holds 2,704. A
# longer text would be refused long after Redis acknowledged it, so each is bounded where it is given.
_RECORD = len("session:") + MAX_ID_BYTES
LONGEST = {
    "namespace": 64,
    "scope": len("session"),
    "record": _RECORD,
    "parent": _RECORD,
    "source": _RECORD,
    "owner": MAX_ID_BYTES,
    "phase": 6 * MAX_PHASE,  # each character escaped
    "tag": KEY_BYTES + 1 + TEXT_BYTES,
    "collection": COLLECTION_BYTES,
    "key": ITEM_KEY_BYTES,
    "subject": _RECORD,
    "type": 200,
    "epoch": 32,
    "event": 128,
    "id": 32,
    "kind": 32,
    "name": 1024,
}
SERIAL = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()


def _of_some(name: str, which: Column[Any], *columns: Column[Any]) -> None:
    """An index of the rows in which a column is not NULL."""
    there = which.is_not(None)
    Index(name, *columns, postgresql_where=there, sqlite_where=there)


# One row each: how many partitions it has, and the archive's id, which Redis has too.
namespaces = Table(
    "namespaces",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("archive_id", TEXT, nullable=False),
    Column("partitions", Integer, nullable=False),
    Column("layout", Integer, nullable=False),
)

# How far each epoch of a partition is archived; `event` is the last entry's, `closed` when another epoch began.
cursors = Table(
    "cursors",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("event", TEXT, nullable=False),
    Column("closed", Boolean, nullable=False),
    # By this database's clock; NULL: by an older release, or as SQL was repaired.
    Column("minted_ms", BigInteger, nullable=True),
    # Whether Redis was told of it; NULL: by an older release, so it may be.
    Column("begun", Boolean, nullable=True),
)

# How each record stands at its head, and whose it is. Listings walk its indexes by `listed_ms`.
# `phase` is where its state machine is, as a commit since revision 3 moved it; `size` are the bytes of its commits
# since then. What did not change since has neither.
records = Table(
    "records",
    metadata,
    Column("key", SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("record", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("scope", TEXT, nullable=False),
    Column("owner", TEXT, nullable=True),
    Column("epoch", TEXT, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("updated_ms", BigInteger, nullable=False),
    Column("listed_ms", BigInteger, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("parent", TEXT, nullable=True),
    Column("lifetime", TEXT, nullable=True),
    Column("phase", TEXT, nullable=True),
    Column("size", BigInteger, nullable=True),
    # Else SQLite gives the number of an erased record again, and a reader that has just looked it up takes the new one.
    sqlite_autoincrement=True,
)
# By a time that moves once a minute: else each change of a record is one of its indexes, too.
_NEWEST = (records.c.scope, records.c.deleted, records.c.listed_ms, records.c.key)
Index("records_named", records.c.namespace, records.c.record, unique=True)
Index("records_listed", records.c.namespace, *_NEWEST)
_of_some("records_owned", records.c.owner, records.c.namespace, records.c.owner, *_NEWEST)
_of_some("records_phased", records.c.phase, records.c.namespace, records.c.phase, *_NEWEST)
_of_some("records_forked", records.c.parent, records.c.namespace, records.c.parent)
_of_some("records_mortal", records.c.lifetime, records.c.namespace, records.c.partition, records.c.record)

# `data` are the steps of a commit. One that adds a message has no value: `messages` has it under the step's number. Nor
# has one that puts an item: `items` has it under the change's version.
changes = Table(
    "changes",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("offset", BigInteger, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("epoch", TEXT, nullable=False),
    Column("event", TEXT, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("actor", TEXT, nullable=False),
    Column("label", TEXT, nullable=True),
    Column("data", LargeBinary, nullable=False),
)
_of_some("changes_labels", changes.c.label, changes.c.record, changes.c.version)

# What messages say, and the version that added each.
messages = Table(
    "messages",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# Whole states: each hundredth version, where there is a label, and the base that a purge leaves.
snapshots = Table(
    "snapshots",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# A row for each time that an item was put, or deleted: then `data` is empty. Rows of version 0 were handed down by
# another record, which went; `origin` is the one that they were written under, NULL for the record itself.
items = Table(
    "items",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("collection", LargeBinary, primary_key=True),
    Column("key", LargeBinary, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("origin", TEXT, nullable=True),
    Column("data", LargeBinary, nullable=False),
)

# Old rows of a record, compressed: changes `first` to `last`, or messages `start` to `stop` (exclusive), committed
# between two times. A row in between may be in its table still.
change_blocks = Table(
    "change_blocks",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("last", BigInteger, primary_key=True, autoincrement=False),
    Column("first", BigInteger, nullable=False),
    Column("oldest_ms", BigInteger, nullable=False),
    Column("newest_ms", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# The same of messages.
message_blocks = Table(
    "message_blocks",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("stop", BigInteger, primary_key=True, autoincrement=False),
    Column("start", BigInteger, nullable=False),
    Column("oldest_ms", BigInteger, nullable=False),
    Column("newest_ms", BigInteger, nullable=False),
    Column("count", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# By which tags records are found, those of their heads.
tags = Table(
    "tags",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("tag", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
)
Index("tags_held", tags.c.namespace, tags.c.record)

# What there is many times of a record, and goes with it.
OF_A_RECORD = (changes, messages, snapshots, items, change_blocks, message_blocks)

# Since `version`, the record shows messages `start` to `stop` (exclusive) kept under `source`, which may be itself.
shares = Table(
    "shares",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("source", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("stop", BigInteger, primary_key=True, autoincrement=False),
)
Index("shares_held", shares.c.namespace, shares.c.record)

# Since `version`, the record shows below its own items those that `source` put or deleted at its versions `first` to
# `last`; of two places the higher one lies above the other.
layers = Table(
    "layers",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("source", TEXT, nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
)
Index("layers_shown", layers.c.namespace, layers.c.source)

# What is in no history: entries that SQL refuses, and changes that another life replaced, whole, with the reason.
quarantine = Table(
    "quarantine",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("epoch", TEXT, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("event", TEXT, nullable=False),
    Column("record", TEXT, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("reason", TEXT, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
)
Index("quarantine_namespaces", quarantine.c.namespace)

# Commits of closed epochs that their record does not continue. `branch` names them within the record, `owner` is whose
# it is as far as they say, `told`: an event was published about the branch.
branches = Table(
    "branches",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
    Column("epoch", TEXT, primary_key=True),
    Column("event", TEXT, primary_key=True),
    Column("branch", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("actor", TEXT, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("cause", TEXT, nullable=False),
    Column("kept_ms", BigInteger, nullable=False),
    Column("owner", TEXT, nullable=True),
    Column("told", Boolean, nullable=False),
)

# `offset` counts a partition's events, not its journal's entries; `id` begins with the replica that wrote it.
events = Table(
    "events",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, primary_key=True),
    Column("offset", BigInteger, primary_key=True, autoincrement=False),
    Column("id", TEXT, nullable=False),
    Column("type", TEXT, nullable=False),
    Column("subject", TEXT, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("actor", TEXT, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
Index("events_by_subject", events.c.namespace, events.c.subject, events.c.time_ms)
Index("events_by_time", events.c.namespace, events.c.time_ms)
Index("events_by_type", events.c.namespace, events.c.type, events.c.time_ms)

# Records that are to be erased, or are and may still be in Redis: from the request until nothing is left anywhere.
# `version` is the last one that was erased here, 0 while the rows are still there; `forks`: those go too.
# `actor`: who asked for it, whoever completes it.
erasures = Table(
    "erasures",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
    Column("partition", Integer, nullable=False),
    Column("owner", TEXT, nullable=True),
    Column("forks", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("actor", TEXT, nullable=False, server_default=""),  # a release that knows no actor leaves it out
)

# Of the service's callers. `digest` is all that is kept of a token; `rights` are names with commas between them.
access_tokens = Table(
    "access_tokens",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("id", TEXT, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("prefix", TEXT, nullable=False),
    Column("rights", TEXT, nullable=False),
    Column("actor", TEXT, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=True),
    Column("revoked_ms", BigInteger, nullable=True),
    Column("made_by", TEXT, nullable=True),
)
