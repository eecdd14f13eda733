"""The table of docs/running/upgrades.md of what an older release does with newer things: each row is a test's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
HEAD = "| newer | an older worker, archiver or client |"
TESTS = {
    "a table, a column": (
        "tests/contracts/test_cold_opening.py::test_a_database_of_a_newer_release_is_used_while_it_has_what_this_one_needs",
        "tests/faults/test_rolling_releases.py"
        "::test_workers_of_two_releases_start_and_stop_beside_one_another_and_the_new_one_is_taken_back",
        "tests/artefacts/test_two_wheels.py::test_two_wheels_serve_beside_one_another_and_the_new_one_is_taken_back",
    ),
    "an operation in the journal": (
        "tests/tiers/test_archiver.py::test_an_entry_that_only_a_newer_release_knows_stops_its_partition_and_no_other",
        "tests/tiers/test_archiver.py::test_the_doctor_names_an_operation_that_only_a_newer_release_knows",
        "tests/store/test_listings.py::test_a_step_of_a_newer_release_stops_a_fresh_listing_and_leaves_sql_alone",
    ),
    "a type of event, a name in the data of an event": (
        "tests/events/test_events.py::test_what_only_a_newer_release_publishes_is_passed_on",
        "tests/agents/test_agents.py::test_unknown_and_malformed_events_are_not_fatal",
    ),
    "a Lua script": (
        "tests/faults/test_script_cache.py::test_two_releases_that_differ_in_their_scripts_share_a_server",
    ),
    "a layout of keys in Redis": ("tests/store/test_bad_input.py::test_redis_and_archive_must_belong_together",),
    "a name in the report of a replica": ("tests/warm/test_heartbeat.py::test_what_cannot_be_read_hides_no_other",),
    "a setting of a search index": (
        "tests/search/test_search_following.py::test_settings_that_a_newer_release_added_to_an_index_are_ignored",
    ),
    "a version of your own `Schema`": (
        "tests/faults/test_rolling_releases.py::test_without_the_canary_the_release_before_is_refused",
        "tests/faults/test_rolling_releases.py::test_a_canary_and_then_the_switch_lose_no_count_and_refuse_no_record",
    ),
    "a name in an answer of the HTTP service": (
        "tests/remote/test_newer_service.py::test_a_remote_store_leaves_out_what_a_newer_service_answers_beside",
    ),
    "a part of an output of the HTTP service": (
        "tests/remote/test_newer_service.py::test_a_part_of_an_output_that_only_a_newer_release_knows_is_passed_on",
    ),
    "an error of the HTTP service": (
        "tests/remote/test_newer_service.py::test_an_error_that_only_a_newer_release_knows_is_what_its_status_means",
    ),
    "a name in a request to an older service": (
        "tests/service/test_interface.py::test_a_request_with_a_name_of_a_newer_release_changes_nothing",
    ),
}


def rows() -> list[str]:
    """The first column of the table."""
    lines = (ROOT / "docs/running/upgrades.md").read_text().splitlines()
    table = lines[lines.index(HEAD) + 2 :]
    return [line.split("|")[1].strip() for line in table[: table.index("")]]


def test_each_row_has_tests_and_each_test_a_row() -> None:
    assert rows() == list(TESTS)


@pytest.mark.parametrize("row", TESTS)
def test_the_tests_of_a_row_are_there(row: str) -> None:
    for path, _, name in (each.partition("::") for each in TESTS[row]):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"
