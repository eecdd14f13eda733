"""The tables of the index, made when search is switched on. Law: triggers note what changed, in its own transaction.

So whatever changes a record - the archiver, an import, a repair, an erasure, by whichever release - is noted, and
nothing of it knows of the index. What they do is bounded: a row for each record, and the removal of what is erased.

Design: section 21.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Connection, Index, Integer, LargeBinary, MetaData, Table, Text
from sqlalchemy import inspect as inspect_database

from distributed_state.cold.tables import TEXT

metadata = MetaData()
_SERIAL = BigInteger().with_variant(Integer, "sqlite")

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
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", TEXT, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("record", BigInteger, nullable=False),
    Column("gone", TEXT, nullable=True),
    sqlite_autoincrement=True,
)
Index("search_due_partitions", due.c.namespace, due.c.partition, due.c.id)

# How far each record is in the index.
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
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
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

_SQLITE = (
    "CREATE VIRTUAL TABLE search_words USING fts5(text, content='search_documents', content_rowid='id', "
    "tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER search_put AFTER INSERT ON search_documents BEGIN "
    "INSERT INTO search_words (rowid, text) VALUES (NEW.id, NEW.text); END",
    "CREATE TRIGGER search_removed AFTER DELETE ON search_documents BEGIN "
    "INSERT INTO search_words (search_words, rowid, text) VALUES ('delete', OLD.id, OLD.text); END",
    # One row of a record is enough: here nobody writes while another one does.
    "CREATE UNIQUE INDEX search_due_once ON search_due (record)",
    "CREATE TRIGGER search_changed AFTER INSERT ON changes BEGIN "
    "INSERT OR IGNORE INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM records r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record; END",
    "CREATE TRIGGER search_erased AFTER DELETE ON records "
    "WHEN OLD.scope <> 'erased' AND EXISTS (SELECT 1 FROM search_indexes i WHERE i.namespace = OLD.namespace) BEGIN "
    "DELETE FROM search_documents WHERE record = OLD.key; DELETE FROM search_heads WHERE record = OLD.key; "
    "INSERT OR REPLACE INTO search_due (namespace, partition, record, gone) "
    "VALUES (OLD.namespace, OLD.partition, OLD.key, OLD.record); END",
)
_SQLITE_CHANGED = (
    "CREATE TRIGGER search_rewritten_{0} AFTER UPDATE ON {0} BEGIN "
    "DELETE FROM search_documents WHERE record = NEW.record; DELETE FROM search_heads WHERE record = NEW.record; "
    "INSERT OR IGNORE INTO search_due (namespace, partition, record) SELECT r.namespace, r.partition, r.key "
    "FROM records r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.key = NEW.record; END"
)

# SECURITY DEFINER: an archiver needs no right on tables that it does not know, and that it had none would stop it.
_FUNCTION = (
    "CREATE FUNCTION {0}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT "
    "AS $$ BEGIN {1} RETURN NULL; END $$"
)
_NOTE = (
    "INSERT INTO search_due (namespace, partition, record) SELECT DISTINCT r.namespace, r.partition, r.key "
    "FROM new_rows n JOIN records r ON r.key = n.record JOIN search_indexes i ON i.namespace = r.namespace; "
)
# Whoever writes them just now is waited for: then its rows are seen, and removed, too.
_WAIT = (
    "PERFORM 1 FROM search_partitions p WHERE (p.namespace, p.partition) IN (SELECT r.namespace, r.partition FROM {0}) "
    "ORDER BY p.partition FOR UPDATE; "
)
_REMOVE = (
    "DELETE FROM search_documents WHERE record IN (SELECT {0}); DELETE FROM search_heads WHERE record IN (SELECT {0}); "
)
_POSTGRESQL = (
    "ALTER TABLE search_documents ADD COLUMN words tsvector",
    "CREATE INDEX search_documents_words ON search_documents USING gin (words)",
    _FUNCTION.format("search_note_changes", _NOTE),
    "CREATE TRIGGER search_changed AFTER INSERT ON changes REFERENCING NEW TABLE AS new_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_changes()",
    _FUNCTION.format(
        "search_note_erased",
        _WAIT.format("old_rows r")
        + _REMOVE.format("key FROM old_rows")
        + "INSERT INTO search_due (namespace, partition, record, gone) SELECT r.namespace, r.partition, r.key, "
        "r.record FROM old_rows r JOIN search_indexes i ON i.namespace = r.namespace WHERE r.scope <> 'erased';",
    ),
    "CREATE TRIGGER search_erased AFTER DELETE ON records REFERENCING OLD TABLE AS old_rows "
    "FOR EACH STATEMENT EXECUTE FUNCTION search_note_erased()",
    _FUNCTION.format(
        "search_note_rewritten",
        _WAIT.format("new_rows n JOIN records r ON r.key = n.record") + _REMOVE.format("record FROM new_rows") + _NOTE,
    ),
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
    triggers = [("search_changed", "changes"), ("search_erased", "records")]
    triggers += [(f"search_rewritten_{table}", table) for table in _CHANGED]
    for trigger, table in triggers:
        connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {trigger}" + (f" ON {table}" if postgresql else ""))
    if postgresql:
        for name in ("changes", "erased", "rewritten"):
            connection.exec_driver_sql(f"DROP FUNCTION IF EXISTS search_note_{name}()")
        connection.exec_driver_sql("DROP TABLE IF EXISTS search_vectors")
    else:
        connection.exec_driver_sql("DROP TABLE IF EXISTS search_words")
    metadata.drop_all(connection)


def scrub(connection: Connection) -> None:
    """Have nothing left of what was removed from SQLite's index: until its parts are merged, they hold the words."""
    if connection.dialect.name == "sqlite" and there(connection):
        connection.exec_driver_sql("INSERT INTO search_words (search_words) VALUES ('optimize')")
