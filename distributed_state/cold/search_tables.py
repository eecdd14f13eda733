"""The tables of the index, made when search is switched on. Law: triggers note what changed, in its own transaction.

So whatever changes a record - the archiver, an import, a repair, an erasure, by whichever release - is noted, and
nothing of it knows of the index. What they do is bounded: a row for each record, and the removal of what is erased.

Design: section 21.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Connection, Index, Integer, LargeBinary, MetaData, Table, Text
from sqlalchemy import inspect as inspect_database

from distributed_state.cold.tables import SERIAL, TEXT

metadata = MetaData()

indexes = Table(
    "search_indexes",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("settings", TEXT, nullable=False),
    Column("filled", Boolean, nullable=False),
)

# Who writes the index of a partition holds its row, so that an erasure waits for that, and nobody else does.
partitions = Table(
    "search_partitions",
    metadata,
    Column("namespace", TEXT, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("claim", TEXT, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

# Records with changes that the index lacks; several rows of one are as good as one. `gone`: its text, of one that was
# erased, for an index that is elsewhere.
due = Table(
    "search_due",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("record", BigInteger, nullable=False),
    Column("gone", TEXT, nullable=True),
    sqlite_autoincrement=True,
)
Index("search_due_partitions", due.c.namespace, due.c.partition, due.c.id)
Index("search_due_records", due.c.record)

# How far each record is in the index. Without an epoch: nowhere, as what SQL stores of it was encrypted anew. Then the
# number is another one each time, so that who read the record before that does not write it after that.
heads = Table(
    "search_heads",
    metadata,
    Column("record", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", TEXT, nullable=False),
    Column("version", BigInteger, nullable=False),
)

documents = Table(
    "search_documents",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("record", BigInteger, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("collection", LargeBinary, nullable=False),
    Column("name", LargeBinary, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("ends_ms", BigInteger, nullable=True),
    Column("digest", LargeBinary, nullable=False),
    Column("text", Text, nullable=False),
    Column("value", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
_NAME = (documents.c.record, documents.c.kind, documents.c.collection, documents.c.name)
Index("search_documents_named", *_NAME, unique=True)

_CHANGED = ("changes", "messages", "items", "change_blocks", "message_blocks")  # what is encrypted anew there

_SQLITE_NOTE = (
    "INSERT INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM records r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record{0};"
)
_SQLITE = (
    "CREATE VIRTUAL TABLE search_words USING fts5(text, content='search_documents', content_rowid='id', "
    "tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER search_put AFTER INSERT ON search_documents BEGIN "
    "INSERT INTO search_words (rowid, text) VALUES (NEW.id, NEW.text); END",
    "CREATE TRIGGER search_removed AFTER DELETE ON search_documents BEGIN "
    "INSERT INTO search_words (search_words, rowid, text) VALUES ('delete', OLD.id, OLD.text); END",
    "CREATE TRIGGER search_changed AFTER INSERT ON changes BEGIN " + _SQLITE_NOTE.format("") + " END",
    "CREATE TRIGGER search_imported AFTER INSERT ON snapshots BEGIN "
    + _SQLITE_NOTE.format(" AND NOT EXISTS (SELECT 1 FROM search_heads h WHERE h.record = r.key)")
    + " END",
    "CREATE TRIGGER search_erased AFTER DELETE ON records "
    "WHEN OLD.scope <> 'erased' AND EXISTS (SELECT 1 FROM search_indexes i WHERE i.namespace = OLD.namespace) BEGIN "
    "DELETE FROM search_documents WHERE record = OLD.key; DELETE FROM search_heads WHERE record = OLD.key; "
    "INSERT INTO search_due (namespace, partition, record, gone) "
    "VALUES (OLD.namespace, OLD.partition, OLD.key, OLD.record); END",
)
_SQLITE_CHANGED = (
    "CREATE TRIGGER search_rewritten_{0} AFTER UPDATE ON {0} BEGIN "
    "DELETE FROM search_documents WHERE record = NEW.record; "
    "INSERT INTO search_heads (record, epoch, version) SELECT r.key, '', 1 FROM records r "
    "JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record ON CONFLICT (record) "
    "DO UPDATE SET epoch = '', version = CASE epoch WHEN '' THEN version + 1 ELSE 1 END; "
    + _SQLITE_NOTE.format(" AND NOT EXISTS (SELECT 1 FROM search_due d WHERE d.record = r.key)")
    + " END"
)

# SECURITY DEFINER: an archiver needs no right on tables that it does not know, and that it had none would stop it.
_FUNCTION = (
    "CREATE FUNCTION {0}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT "
    "AS $$ BEGIN {1} RETURN NULL; END $$"
)
_NOTE = (
    "INSERT INTO search_due (namespace, partition, record) SELECT DISTINCT r.namespace, r.partition, r.key "
    "FROM new_rows n JOIN records r ON r.key = n.record JOIN search_indexes i ON i.namespace = r.namespace{}; "
)
_UNKNOWN = " WHERE NOT EXISTS (SELECT 1 FROM search_heads h WHERE h.record = n.record)"
# A transaction that rewrites a record row by row notes it once.
_NOTE_REWRITTEN = (
    "WITH rewritten AS (INSERT INTO search_heads AS h (record, epoch, version) "
    "SELECT DISTINCT r.key, '', txid_current() FROM new_rows n JOIN records r ON r.key = n.record "
    "JOIN search_indexes i ON i.namespace = r.namespace "
    "ON CONFLICT (record) DO UPDATE SET epoch = '', version = excluded.version "
    "WHERE h.epoch <> '' OR h.version <> excluded.version RETURNING h.record) "
    "INSERT INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM rewritten w JOIN records r ON r.key = w.record; "
)
# Whoever writes them just now is waited for: then its rows are seen, and removed, too.
_WAIT = (
    "PERFORM 1 FROM search_partitions p WHERE (p.namespace, p.partition) IN (SELECT r.namespace, r.partition FROM {0}) "
    "ORDER BY p.partition FOR UPDATE; "
)
_REMOVE = "DELETE FROM search_{1} WHERE record IN (SELECT {0}); "
_POSTGRESQL = (
    "ALTER TABLE search_documents ADD COLUMN words tsvector",
    "CREATE INDEX search_documents_words ON search_documents USING gin (words)",
    _FUNCTION.format("search_note_changes", _NOTE.format("")),
    "CREATE TRIGGER search_changed AFTER INSERT ON changes REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_changes()",
    _FUNCTION.format(
        "search_note_erased",
        _WAIT.format("old_rows r")
        + _REMOVE.format("key FROM old_rows", "documents")
        + _REMOVE.format("key FROM old_rows", "heads")
        + "INSERT INTO search_due (namespace, partition, record, gone) SELECT r.namespace, r.partition, r.key, "
        "r.record FROM old_rows r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.scope <> 'erased';",
    ),
    "CREATE TRIGGER search_erased AFTER DELETE ON records REFERENCING OLD TABLE AS old_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_erased()",
    _FUNCTION.format(
        "search_note_rewritten",
        _WAIT.format("new_rows n JOIN records r ON r.key = n.record")
        + _REMOVE.format("record FROM new_rows", "documents")
        + _NOTE_REWRITTEN,
    ),
    # Of an imported record whose history was purged there is only that.
    _FUNCTION.format("search_note_imported", _NOTE.format(_UNKNOWN)),
    "CREATE TRIGGER search_imported AFTER INSERT ON snapshots REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_imported()",
)
_POSTGRESQL_CHANGED = (
    "CREATE TRIGGER search_rewritten_{0} AFTER UPDATE ON {0} REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_rewritten()"
)
# Any number of dimensions; an index is of those with one number of them.
VECTORS = (
    "CREATE TABLE IF NOT EXISTS search_vectors (document bigint PRIMARY KEY REFERENCES search_documents (id) "
    "ON DELETE CASCADE, embedding vector NOT NULL)"
)
VECTOR_INDEX = (
    "CREATE INDEX IF NOT EXISTS search_vectors_{0} ON search_vectors USING hnsw "
    "((embedding::vector({0})) vector_cosine_ops) WHERE vector_dims(embedding) = {0}"
)


def there(connection: Connection) -> bool:
    """Whether search was ever switched on in this database."""
    return inspect_database(connection).has_table(indexes.name)


def lock(connection: Connection, mode: str) -> None:
    """Wait for all who are changing what the triggers note, and keep them waiting until this transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"LOCK TABLE records, snapshots, {', '.join(_CHANGED)} IN {mode} MODE")


def create(connection: Connection) -> None:
    """Make the tables and the triggers."""
    metadata.create_all(connection)
    postgresql = connection.dialect.name == "postgresql"
    for statement in _POSTGRESQL if postgresql else _SQLITE:
        connection.exec_driver_sql(statement)
    for table in _CHANGED:
        connection.exec_driver_sql((_POSTGRESQL_CHANGED if postgresql else _SQLITE_CHANGED).format(table))


def drop(connection: Connection) -> None:
    """Take the triggers and the tables away, with all that is in them."""
    postgresql = connection.dialect.name == "postgresql"
    triggers = [("search_changed", "changes"), ("search_erased", "records"), ("search_imported", "snapshots")]
    triggers += [(f"search_rewritten_{table}", table) for table in _CHANGED]
    for trigger, table in triggers:
        connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {trigger}" + (f" ON {table}" if postgresql else ""))
    if postgresql:
        for name in ("changes", "erased", "rewritten", "imported"):
            connection.exec_driver_sql(f"DROP FUNCTION IF EXISTS search_note_{name}()")
        connection.exec_driver_sql("DROP TABLE IF EXISTS search_vectors")
    else:
        connection.exec_driver_sql("DROP TABLE IF EXISTS search_words")
    metadata.drop_all(connection)


def scrub(connection: Connection) -> None:
    """Have nothing left of what was removed from SQLite's index: until its parts are merged, they hold the words."""
    if there(connection):
        connection.exec_driver_sql("INSERT INTO search_words (search_words) VALUES ('optimize')")
