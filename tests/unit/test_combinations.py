"""How tests are spread over faces and servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from combinations import (
    EMBEDDED,
    EVERY,
    QUICK_FILES,
    SERVERS,
    WARM,
    Combination,
    covering,
    few,
    parts,
    quick,
    shared_out,
)

NAMES = [f"test_{number}" for number in range(300)]
FLEETS = tuple(combination for combination in EVERY if combination.fleet)
BLOCKING = tuple(combination for combination in EVERY if combination.face == "blocking")


@pytest.mark.parametrize("allowed", [EVERY, FLEETS, BLOCKING, EVERY[:1], ()])
def test_wide_meets_each_face_server_and_database(allowed: tuple[Combination, ...]) -> None:
    for name in NAMES:
        chosen = covering(name, allowed)
        assert set(chosen) <= set(allowed)
        assert set().union(*map(parts, chosen)) == set().union(*map(parts, allowed))
        assert len(set(chosen)) == len(chosen)
    assert {each for name in NAMES for each in covering(name, allowed)} == set(allowed), "all tests meet all"


def test_wide_is_no_more_than_there_are_servers() -> None:
    assert {len(covering(name, EVERY)) for name in NAMES} <= {len(WARM), len(WARM) + 1}


def test_by_default_a_test_meets_an_embedded_store_or_servers_in_turn() -> None:
    found = [few(name, EVERY) for name in NAMES]
    assert {len(one) for one in found} == {1}
    assert {each for (each,) in found} == {*EMBEDDED, *SERVERS}, "each kind of server, both faces and databases"


def test_on_one_face_tests_still_meet_both() -> None:
    assert {each for name in NAMES for each in few(name, BLOCKING)} == set(BLOCKING) & {*EMBEDDED, *SERVERS}


def test_by_default_a_fleets_test_meets_one_kind_of_servers_in_turn() -> None:
    assert {tuple(few(name, FLEETS)) for name in NAMES} == {(each,) for each in SERVERS}


def test_a_brief_test_meets_one() -> None:
    assert {tuple(few(name, EVERY, "servers")) for name in NAMES} == {(each,) for each in SERVERS}
    assert {tuple(few(name, EVERY, "embedded")) for name in NAMES} == {(each,) for each in EMBEDDED}
    assert {tuple(few(name, FLEETS, "embedded")) for name in NAMES} == {(each,) for each in SERVERS}


def test_a_quick_test_needs_no_server() -> None:
    assert {tuple(quick(name, EVERY)) for name in NAMES} == {(each,) for each in EMBEDDED}
    assert quick("test_0", FLEETS) == []


@pytest.mark.parametrize("allowed", list(itertools.combinations(EVERY, 1)), ids=str)
def test_no_test_is_left_out_by_default(allowed: tuple[object, ...]) -> None:
    assert few("test_0", allowed) == list(allowed)  # type: ignore[arg-type]  # one of them


def test_the_files_of_the_core_are_there() -> None:
    folder = Path(__file__).parents[1] / "integration"
    assert [name for name in QUICK_FILES if not (folder / name).is_file()] == []


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
