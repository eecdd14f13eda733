"""How tests are spread over APIs and servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from combinations import (
    EMBEDDED,
    EVERY,
    FLEETS,
    PRODUCTION,
    QUICK_FILES,
    SINGLE,
    Combination,
    by_default,
    quick,
    shared_out,
    wide,
)

pytestmark = pytest.mark.unit

NAMES = [f"test_{number}" for number in range(300)]
BLOCKING = tuple(combination for combination in EVERY if combination.api == "blocking")
CLUSTERS = tuple(
    combination for combination in FLEETS if combination.warm == "cluster" and combination.cold == "sqlite"
)


def wide_beside_default(name: str, allowed: tuple[Combination, ...]) -> list[Combination]:
    return wide(name, allowed, by_default(name, allowed))


def test_a_wide_run_meets_the_embedded_store_and_servers_with_postgresql() -> None:
    found = [wide_beside_default(name, EVERY) for name in NAMES]
    assert {len(each) for each in found} == {2}
    assert {embedded for embedded, _ in found} == set(EMBEDDED)
    assert {servers for _, servers in found} == set(PRODUCTION), "each kind of server, on both APIs"
    assert all(embedded.api != servers.api for embedded, servers in found), "and each test meets both APIs"


def test_a_wide_run_adds_to_a_default_run_only_what_that_did_not_meet() -> None:
    for name, allowed in itertools.product(NAMES, (EVERY, BLOCKING, FLEETS, CLUSTERS)):
        assert set(by_default(name, allowed)) <= set(wide_beside_default(name, allowed))


def test_a_wide_run_keeps_to_what_a_test_allows() -> None:
    assert {tuple(wide_beside_default(name, BLOCKING)) for name in NAMES} == {
        (EMBEDDED[1], each) for each in PRODUCTION if each.api == "blocking"
    }
    assert {tuple(wide_beside_default(name, FLEETS)) for name in NAMES} == {(each,) for each in SINGLE}
    assert {tuple(wide_beside_default(name, CLUSTERS)) for name in NAMES} == {(each,) for each in CLUSTERS}
    assert wide_beside_default("test_0", ()) == []


def test_by_default_a_test_meets_an_embedded_store() -> None:
    assert {tuple(by_default(name, EVERY)) for name in NAMES} == {(each,) for each in EMBEDDED}


def test_the_only_run_of_a_test_meets_an_embedded_store_or_one_server_in_turn() -> None:
    found = [by_default(name, EVERY, "in turn") for name in NAMES]
    assert {len(one) for one in found} == {1}
    assert {each for (each,) in found} == {*EMBEDDED, *SINGLE}, "each server, and both APIs"


def test_on_one_api_tests_still_meet_both_kinds() -> None:
    met = {each for name in NAMES for each in by_default(name, BLOCKING, "in turn")}
    assert met == set(BLOCKING) & {*EMBEDDED, *SINGLE}


def test_by_default_a_fleets_test_meets_one_server_in_turn() -> None:
    assert {tuple(by_default(name, FLEETS)) for name in NAMES} == {(each,) for each in SINGLE}
    assert {tuple(by_default(name, CLUSTERS)) for name in NAMES} == {(each,) for each in CLUSTERS}


def test_a_test_that_asks_for_servers_meets_one() -> None:
    assert {tuple(by_default(name, EVERY, "servers")) for name in NAMES} == {(each,) for each in SINGLE}


def test_a_quick_test_needs_no_server() -> None:
    assert {tuple(quick(name, EVERY)) for name in NAMES} == {(each,) for each in EMBEDDED}
    assert quick("test_0", FLEETS) == []


@pytest.mark.parametrize("allowed", list(itertools.combinations(EVERY, 1)), ids=str)
def test_no_test_is_left_out_by_default(allowed: tuple[Combination, ...]) -> None:
    assert by_default("test_0", allowed) == wide_beside_default("test_0", allowed) == list(allowed)


def test_the_files_of_the_core_are_there() -> None:
    assert set(QUICK_FILES) <= {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("combinations", [1, 2, 4, 9])
def test_cases_that_share_out_the_combinations_meet_all_of_them(cases: int, combinations: int) -> None:
    met = {
        at: [case for case in range(cases) if shared_out(case, at, cases, combinations)] for at in range(combinations)
    }
    assert all(met.values()), "each combination is met by some case"
    assert {case for each in met.values() for case in each} == set(range(cases)), "and each case meets some"
    parts = min(cases, combinations, 3)
    assert sum(map(len, met.values())) < combinations * cases / parts + combinations
