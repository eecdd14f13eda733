"""Pages about what is kept in servers: keys in Redis, scripts, tables in SQL. Law: each is read from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from docs_tables import code, table

from distributed_state.cold import search_index, tables
from distributed_state.port import Script
from distributed_state.values import keys
from distributed_state.values.model import Ref
from distributed_state.warm import scripts

LUA = Path(inspect.getfile(scripts)).with_name("lua")
DIALECTS = [sqlalchemy.make_url(each).get_dialect()() for each in ("postgresql+psycopg://", "sqlite://")]
_COMMENT = re.compile(r"^\s+(?:self\.)?(\w+)(?:: [\w\[\], ]+)?(?: = .*?)?  # (.+)$", re.MULTILINE)


def key_page() -> str:
    """Every name in Redis, and what is there."""
    sample = keys.Keys("NAMESPACE", 1)
    record, partition = sample.of(Ref("session", "ID")), sample.partition(0)
    sections = {
        "Keys of a record": _fields(keys.RecordKeys, record),
        "Keys of a partition": [*_fields(keys.PartitionKeys, partition), *_methods(sample, r"partition")],
        "Keys of the whole store": [*_fields(keys.Keys, sample), *_methods(sample, r"(?!.*partition)")],
    }
    parts = [
        "# Keys in Redis",
        "`NAMESPACE` is the setting `namespace`. `{p}` is a partition's hash tag: a checksum of scope and id "
        "assigns each record to one of `partitions`, and all keys of a partition are in one slot of a cluster. Ids are "
        "escaped, so that no two share a name. The [design](../design/keys-and-commit.md#3-keys) gives the reasons. "
        "Keys and their contents are not an interface: read them to inspect a server, but do not write them.",
    ]
    for title, rows in sections.items():
        parts += [f"## {title}", table(("name", "type", "what it is"), rows)]
    return "\n\n".join(parts)


Row = tuple[str, str, str]


def _row(name: Any, described: str) -> Row:
    kind, _, what = described.partition(": ")
    text = re.sub(r"\{0\.\d+\}", "{p}", name.decode()).replace("session:ID", "SCOPE:ID")
    return code(text), kind.lower(), (what[:1].upper() + what[1:]).rstrip(".")


def _fields(of: type, sample: Any) -> Iterator[Row]:
    """The names that are attributes, each with the comment behind it."""
    for name, comment in _COMMENT.findall(inspect.getsource(of)):
        if isinstance(getattr(sample, name, None), bytes):
            yield _row(getattr(sample, name), comment)


def _methods(sample: keys.Keys, parameters: str) -> Iterator[Row]:
    """The names that take more than a record or a partition, each with its docstring."""
    for _, method in inspect.getmembers(sample, inspect.ismethod):
        takes = list(inspect.signature(method).parameters)
        described = (inspect.getdoc(method) or "").split("\n\n")[0]
        if not re.match(r"(A|Strings)[\w ,]*: ", described) or not re.match(parameters, " ".join(takes)):
            continue
        found = method(*(0 if each == "partition" else each.upper() for each in takes))
        for key in found if isinstance(found, tuple) else (found,):
            yield _row(key, re.sub(r"^(A|Strings)\b ?", "string" if described.startswith("S") else "", described))


def script_page() -> str:
    """The contract of each script."""
    parts = [
        "# Scripts in Redis",
        "Every change in Redis is one script, which first makes all checks and then all writes. Its header describes "
        "its arguments and answers. A script never builds a key or reads your values. Scripts are not an interface: "
        "they change between releases.",
    ]
    named = [each for each in vars(scripts).values() if isinstance(each, Script)]
    for name in (each.name for each in named):
        purpose, contract = contract_of(LUA / f"{name}.lua")
        parts += [f"## `{name}.lua` {{ #{name} }}", purpose, f"```text\n{contract}\n```"]
    parts += ["## Shared parts", "Lines that several scripts include, or that keep one script short."]
    for path in sorted(LUA.glob("include/*.lua")):
        purpose, contract = contract_of(path)
        parts += [f"### `{path.stem}` {{ #include-{path.stem} }}", purpose, f"```text\n{contract}\n```"]
    return "\n\n".join(parts)


def contract_of(path: Path) -> tuple[str, str]:
    """What a script is for, and the rest of its head."""
    head = inspect.cleandoc("\n" + path.read_text().partition("--[[\n")[2].partition("]]\n")[0])
    begin = re.search(r"^(KEYS|Expects|Defines|Returns|ARGV) ", head, re.MULTILINE)
    at = begin.start() if begin else len(head)
    return head[:at].strip().replace("*", r"\*"), head[at:].rstrip()


def sql_page() -> str:
    """Every table and its columns."""
    parts = [
        "# Tables in SQL",
        f"The schema of revision {tables.HEAD}, the same in PostgreSQL and SQLite; Alembic brings an older one up to "
        "date, at open or by `distributed-state migrate`. The [design](../design/archiving.md#the-tables) gives the "
        "reasons. Tables are not an interface: read them to inspect an archive, but do not write them.",
        *_tables(tables.metadata, Path(inspect.getfile(tables)).read_text()),
        "## Tables of the search index",
        "These are created when search is enabled.",
        *_tables(search_index.metadata, Path(inspect.getfile(search_index)).read_text()),
    ]
    return "\n\n".join(parts)


def _tables(metadata: sqlalchemy.MetaData, source: str) -> Iterator[str]:
    for each in metadata.tables.values():
        level = "###" if each.name.startswith("search_") else "##"
        yield f"{level} `{each.name}` {{ #{each.name} }}"
        yield comment_of(each.name, source)
        yield table(("column", "PostgreSQL", "SQLite", ""), map(_column, each.columns))
        indexes = sorted(each.indexes, key=lambda index: str(index.name))
        if indexes:
            yield "Indexes: " + "; ".join(map(_index, indexes)) + "."


def comment_of(name: str, source: str) -> str:
    """What stands above the table in the source, "" for nothing."""
    above = re.search(rf'((?:^#.*\n)*)^\w+ = Table\(\s*"{name}"', source, re.MULTILINE)
    return " ".join(line.lstrip("# ") for line in above[1].splitlines()) if above else ""


def _column(column: sqlalchemy.Column[Any]) -> tuple[str, str, str, str]:
    types = [column.type.compile(each).split(" COLLATE")[0] for each in DIALECTS]
    notes = ["key"] if column.primary_key else ["may be NULL"] if column.nullable else []
    return code(column.name), types[0].lower(), types[1].lower(), ", ".join(notes)


def _index(index: sqlalchemy.Index) -> str:
    columns = ", ".join(code(getattr(each, "name", each)) for each in index.expressions)
    where = index.dialect_options["postgresql"]["where"]
    only = "" if where is None else f", where {code(where)}"
    return f"`{index.name}` ({columns}{', unique' if index.unique else ''}{only})"
