"""What the checks conclude from a history, where a change does not say all that it did."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_state.results import Change, Snapshot
from distributed_state.values.items import Item
from tests.simulation.checks import EMPTY, Broken, State, Whole, fold
from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run

pytestmark = pytest.mark.unit
X, Y = ("notes", "x"), ("notes", "y")


def change(version: int, kind: str, set: dict[str, Any], items: dict[tuple[str, str], str | None]) -> Change:
    brought = {name: None if value is None else Item(*name, value, version, "", "1-a") for name, value in items.items()}
    return Change(version, 0.0, kind, f"op{version}", 0, set, (), (), None, None, brought)


def whole(version: int, fields: dict[str, Any], items: dict[tuple[str, str], Any]) -> Whole:
    return Whole(Snapshot(version, fields, (), None, False), items)


def state_after(repair: Change, brought: Whole) -> State | None:
    """What a record is after it had a field and an item, and a repair brought its state three versions later."""
    changes = [change(1, "write", {"a": 1}, {X: "old"}), repair]
    return fold(EMPTY, changes, 0, "s", {}, None, {repair.version: brought}).states[-1]


def test_a_repair_may_hide_items_that_its_change_does_not_name() -> None:
    """SQL lacks the rollback that hid them."""
    repair = change(5, "repair", {"a": 2}, {Y: "new"})
    assert state_after(repair, whole(5, {"a": 2}, {Y: "new"})) == State({"a": 2}, [], {Y: "new"})


def test_a_repair_may_bring_a_record_without_fields() -> None:
    assert state_after(change(5, "repair", {}, {}), whole(5, {}, {X: "old"})) == State({}, [], {X: "old"})


def test_a_repair_that_only_omits_messages_keeps_the_fields() -> None:
    assert state_after(change(5, "repair", {}, {}), whole(5, {"a": 1}, {X: "old"})) == State({"a": 1}, [], {X: "old"})


@pytest.mark.parametrize(
    "brought",
    [whole(5, {"a": 1}, {Y: "new"}), whole(5, {"a": 2}, {Y: "old"}), whole(5, {"a": 2}, {})],
    ids=["field", "item", "no item"],
)
def test_a_repair_that_brought_another_state_than_its_change_says_is_found(brought: Whole) -> None:
    with pytest.raises(Broken, match="G9"):
        state_after(change(5, "repair", {"a": 2}, {Y: "new"}), brought)


def test_a_rollback_that_an_older_sql_lacks_is_no_fault() -> None:
    assert not Run(Plan.of(10072, SHAPES["restored"])).result().broken


def test_a_commit_may_be_lost_with_its_writer_though_a_later_attempt_was_answered_elsewhere() -> None:
    assert not Run(Plan.of(30078, SHAPES["restarts"])).result().broken


def test_what_was_fsynced_may_be_in_a_branch_if_redis_was_emptied_while_it_was_waited_for() -> None:
    assert not Run(Plan.of(23, SHAPES["maintained"])).result().broken
