"""Each text that an index of SQL holds has a bound, and all of a row's bounds fit into a row of PostgreSQL's index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Column, Index, Integer, LargeBinary, MetaData, Table, Text

from distributed_state.cold import search_index, tables

pytestmark = pytest.mark.unit

_ROW = 2704  # bytes: a third of a page
_HEADER = 8
_NUMBER = 8
_LENGTH = 8  # what stands before a text, and what aligns it


def indexes(metadata: MetaData) -> Iterator[tuple[str, list[Column[object]]]]:
    for table in metadata.sorted_tables:
        yield f"{table.name}'s primary key", list(table.primary_key.columns)
        yield from ((str(index.name), list(index.columns)) for index in table.indexes)


def size(columns: list[Column[object]]) -> int:
    """The bytes of the largest row that an index of these columns may get. Raises KeyError for one without a bound."""
    texts = [column for column in columns if isinstance(column.type, (Text, LargeBinary))]
    return (
        _HEADER + sum(tables.LONGEST[column.name] + _LENGTH for column in texts) + _NUMBER * (len(columns) - len(texts))
    )


def test_each_indexed_text_has_a_bound_and_a_row_of_them_fits_into_an_index() -> None:
    found = [*indexes(tables.metadata), *indexes(search_index.metadata)]
    assert len(found) > 30
    assert {name: size(columns) for name, columns in found if size(columns) > _ROW} == {}


def test_an_indexed_text_that_names_no_bound_is_found() -> None:
    """Negative control: and so is one whose bound is too large."""
    new = Table("new", MetaData(), Column("id", Integer, primary_key=True), Column("nickname", Text))
    Index("new_named", new.c.nickname)
    with pytest.raises(KeyError, match="nickname"):
        assert [size(columns) for _, columns in indexes(new.metadata)]
    wide = Table("wide", MetaData(), *(Column(name, Text, primary_key=True) for name in ("record", "source", "parent")))
    assert [size(columns) > _ROW for _, columns in indexes(wide.metadata)] == [True]
