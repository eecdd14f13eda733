"""The table of docs/figures/adapters.md in which adapters are measured, and which releases their frameworks are of."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from deploy.load.frameworks import table
from deploy.load.rows import Row, at_most

pytestmark = pytest.mark.unit


def test_rows_of_a_framework_replace_those_it_had(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n")
    table.write([at_most("B: put", 1, 2, 1.2, "us", "theirs"), at_most("B: get", 3, 2, 1.2, "us", "theirs")], document)
    table.write([Row("A: kept", "9 of 9", "3 of 9", 1.0, "= all", True)], document)
    table.write([at_most("B: put", 2, 2, 1.2, "us", "theirs")], document)
    assert document.read_text().splitlines() == [
        "before", table.BEGIN, *table.HEAD,
        "| A: kept | 9 of 9 | 3 of 9 | 1x | = all |",
        "| B: put | 2 us | theirs: 2 us | 1x | <= 1.2x |",
        table.END, "after",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="begin"):
        table.write([], Path(__file__))


def test_a_missed_goal_is_named() -> None:
    assert table.table([at_most("A: put", 3, 2, 1.2, "us", "theirs")])[0].endswith("<= 1.2x, **missed** |")


def test_the_page_has_the_place_for_it() -> None:
    text = Path(__file__).parents[2].joinpath("docs/figures/adapters.md").read_text()
    assert text.index(table.BEGIN) < text.index(table.END)


def test_the_frameworks_whose_own_tests_run_are_of_the_release_of_these_tests() -> None:
    root = Path(__file__).parents[2]
    lines = root.joinpath("tests/frameworks/archives.txt").read_text().splitlines()
    tested = {line.split()[0] for line in lines if not line.startswith("#")}
    extras = tomllib.loads(root.joinpath("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert tested
    assert tested <= {*extras["frameworks"], *extras["frameworks-crewai"]}
