"""The page on other packages is checked against an index by a workflow; here the check itself is, without one."""

from __future__ import annotations

from collections.abc import Sequence

import check_neighbours
import pytest
from check_neighbours import Neighbour, extras, neighbours, wrong

pytestmark = pytest.mark.unit

EXTRAS = ["adk", "mcp", "serve"]


def index(*impossible: tuple[str, str]) -> object:
    """An index in which these pairs of a requirement and an extra exclude each other."""

    def resolves(requirement: str, chosen: Sequence[str]) -> bool:
        return not any((requirement, extra) in impossible for extra in chosen)

    return resolves


def test_the_page_names_the_packages_and_only_extras_that_there_are() -> None:
    found = neighbours(check_neighbours.PAGE.read_text())
    names = {each.requirement.partition(">=")[0] for each in found}
    asked = {"celery[redis]", "strands-agents", "crewai", "pydantic-ai", "agent-framework", "redisvl", "rq"}
    assert {*asked, "dramatiq[redis]"} <= names
    assert all(">=" in each.requirement for each in found), "an old release would do"
    assert {"embedded", "postgres", "serve"} <= set(extras())
    assert set().union(*(each.excluded for each in found)) <= set(extras())


def test_a_right_row_is_right() -> None:
    resolves = index(("crewai>=1", "adk"))
    assert [*wrong(Neighbour("crewai>=1", frozenset({"adk"})), EXTRAS, resolves)] == []
    assert [*wrong(Neighbour("rq>=3", frozenset()), EXTRAS, resolves)] == []


def test_extras_that_exclude_only_each_other_beside_a_package_are_no_error() -> None:
    together = index()
    assert [
        *wrong(Neighbour("rq>=3", frozenset()), EXTRAS, lambda _, chosen: len(chosen) == 1 and together("", chosen))
    ] == []


@pytest.mark.parametrize(
    ("excluded", "said"),
    [
        ((), "crewai>=1: cannot be installed with adk"),
        (("adk", "mcp"), "crewai>=1: can be installed with mcp now"),
        (("adk", "crew"), "crewai>=1: there is no extra crew"),
    ],
)
def test_a_wrong_row_is_found(excluded: tuple[str, ...], said: str) -> None:
    assert [*wrong(Neighbour("crewai>=1", frozenset(excluded)), EXTRAS, index(("crewai>=1", "adk")))] == [said]


def test_a_row_that_cannot_be_read_is_found() -> None:
    with pytest.raises(ValueError, match="`rq`"):
        neighbours("| `rq` | some | |\n")
