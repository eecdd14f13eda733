"""Positions of events that tenants get: any worker opens them, for their tenant and for nobody else."""

from __future__ import annotations

import pytest

from distributed_state.errors import InvalidValue
from distributed_state.programs.service.answers import Positions

pytestmark = pytest.mark.unit

PLACE = "1-abcdef12:0:17,1-abcdef12:3:4"


def test_a_position_comes_back_at_any_worker_of_the_store() -> None:
    sealed = Positions("a1", "acme:").seal(PLACE)
    assert Positions("a1", "acme:").open(sealed) == PLACE
    assert "abcdef" not in sealed


@pytest.mark.parametrize(("archive", "tenant"), [("a1", "beta:"), ("a2", "acme:")])
def test_it_is_of_one_tenant_and_one_store(archive: str, tenant: str) -> None:
    sealed = Positions("a1", "acme:").seal(PLACE)
    with pytest.raises(InvalidValue, match="not a position"):
        Positions(archive, tenant).open(sealed)


@pytest.mark.parametrize("given", [PLACE, "x", "\u00e9", "A" * 40, "====", "1-abcdef12"])
def test_what_was_not_sealed_is_refused(given: str) -> None:
    with pytest.raises(InvalidValue, match="not a position"):
        Positions("a1", "acme:").open(given)


def test_its_length_says_nothing_of_the_counts() -> None:
    positions = Positions("a1", "acme:")
    assert len(positions.seal("1-abcdef12:0:9")) == len(positions.seal("1-abcdef12:0:1000000"))
    assert positions.seal(PLACE) != positions.seal(PLACE)


def test_who_may_see_all_tenants_gets_it_plain() -> None:
    assert Positions("a1", "").seal(PLACE) == PLACE == Positions("a1", "").open(PLACE)
    assert Positions("a1", "acme:").open("oldest") == "oldest"
    assert Positions("a1", "acme:").open("") == ""
