"""The tables. Law: text is compared byte by byte; users' values are bytes; nothing is stored twice.

`records` gives each record a number, its key. Tables with many rows for a record use the key: `changes`, `messages` and
`snapshots`, for example. The others use the namespace and the record's text, as they may have records that `records`
lacks. A change has the numbers of its messages and the names of its items; their contents are in `messages` and
`items`.

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
from distributed_state.values.usage import MODEL_NAME

# Oldest first. A database with another revision was made by a newer release. Most revisions expand: they add only what
# workers of the release before can leave out, so both releases may use the database. One that is in CONTRACTS removes
# what only older workers use; the first release whose workers do without is named there. No store does that at open.
REVISIONS = ("1", "2", "3", "4", "5")
CONTRACTS: dict[str, str] = {}
HEAD = REVISIONS[-1]
# Pre-release layouts: `export` and `import` move their data.
UNRELEASED = ("0001", "0002", "0003")

# SQLite compares bytes anyway. PostgreSQL would use the database's language, which is slower and has another order.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")
# The largest size of each indexed text in bytes, by the name of its column: an index row of PostgreSQL holds 2,704. A
# longer text would be refused only long after Redis acknowledged it, so the API limits each.
_RECORD = len("session:") + MAX_ID_BYTES
LONGEST = {
    "namespace": 64,
    "scope": len("session"),
    "record": _RECORD,
    "parent": _RECORD,
    "source": _RECORD,
    "owner": MAX_ID_BYTES,
    "due": 80,  # a handler's name and a time: see values/schedule.py
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
    "model": 4 * MODEL_NAME,
}
SERIAL = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()


def _of_some(name: str, which: Column[Any], *columns: Column[Any]) -> None:
    """Make an index of the rows in which a column is not NULL."""
    there = which.is_not(None)
    Index(name, *columns, postgresql_where=there, sqlite_where=there)


# One row for each namespace, with its number of partitions and the archive's id, which Redis has too.
namespaces = Table(
    "namespaces",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("archive_id", TEXT, nullable=False),
    Column("partitions", Integer, nullable=False),
    Column("layout", Integer, nullable=False),
)

# How far each epoch of a partition is archived. `event` is the last entry's; `closed`: another epoch began.
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
    # By this database's clock; NULL: minted by an older release, or begun by a repair of SQL.
    Column("minted_ms", BigInteger, nullable=True),
    # Whether the epoch was, or was about to be, written to Redis; NULL (minted by an older release) means possibly.
    Column("begun", Boolean, nullable=True),
)

# Each record at its head, and its owner. Listings scan the indexes by `listed_ms`.
# `phase` is the state of its state machine, `size` the bytes of its commits, both since revision 3; a record without
# changes since then has neither.
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
    Column("due", TEXT, nullable=True),
    # Otherwise SQLite reuses the key of an erased record, and a reader that has just looked up the key reads the new
    # record.
    sqlite_autoincrement=True,
)
# The time moves at most once a minute: otherwise each change of a record would also change its indexes.
_NEWEST = (records.c.scope, records.c.deleted, records.c.listed_ms, records.c.key)
Index("records_named", records.c.namespace, records.c.record, unique=True)
Index("records_listed", records.c.namespace, *_NEWEST)
_of_some("records_owned", records.c.owner, records.c.namespace, records.c.owner, *_NEWEST)
_of_some("records_phased", records.c.phase, records.c.namespace, records.c.phase, *_NEWEST)
_of_some("records_forked", records.c.parent, records.c.namespace, records.c.parent)
_of_some("records_mortal", records.c.lifetime, records.c.namespace, records.c.partition, records.c.record)
_of_some("records_due", records.c.due, records.c.namespace, records.c.partition, records.c.due, records.c.record)

# `data` has the operations of a commit. One that adds a message has no value: `messages` has it under the operation's
# number. Nor has one that puts an item: `items` has it under the change's version.
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

# The contents of messages, and the version that added each.
messages = Table(
    "messages",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# Whole states: each hundredth version, those with labels, and the base that a purge leaves.
snapshots = Table(
    "snapshots",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# A row for each put or delete of an item; deleted: `data` is empty. Rows of version 0 are copies from a record that was
# erased or purged; `origin` is the record that they were written under, NULL for the record itself.
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
# between two times. Rows in between may still be in their tables.
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

# The same for messages.
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

# The tags of the records' heads, by which records are found.
tags = Table(
    "tags",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("tag", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
)
Index("tags_held", tags.c.namespace, tags.c.record)

# The tables with many rows for a record, which are deleted with it.
OF_A_RECORD = (changes, messages, snapshots, items, change_blocks, message_blocks)

# The tokens that a session's turns used on a day (days since 1970, UTC), by model. A purge keeps them.
usage = Table(
    "usage",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("model", TEXT, primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
)
Index("usage_by_day", usage.c.day)

# Since `version`, the record shows messages `start` to `stop` (exclusive) stored under `source`, which may be itself.
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
# `last`; a higher `place` lies above a lower one.
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

# Entries that SQL refuses, and changes that another epoch replaced, each whole and with the reason.
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

# Commits of closed epochs that their record does not continue. `branch` is their branch within the record, `owner` the
# record's owner at the commit, `told`: the event about the branch was published.
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

# `offset` counts a partition's events, not its journal's entries; `id` begins with the id of the replica that wrote it.
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

# Records that are to be erased, or are erased here and may still be in Redis: from the request until nothing is left.
# `version` is the last erased one, 0 while the rows still exist; `forks`: the forks are erased, too.
# `actor` requested the erasure, even if another one completes it.
erasures = Table(
    "erasures",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("record", TEXT, primary_key=True),
    Column("partition", Integer, nullable=False),
    Column("owner", TEXT, nullable=True),
    Column("forks", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("actor", TEXT, nullable=False, server_default=""),  # older releases do not set it
)

# Tokens of the service's callers. Only the `digest` of a token is stored; `rights` are names separated by commas.
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
