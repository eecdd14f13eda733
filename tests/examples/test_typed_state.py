"""A trip planner whose state is a pydantic model, and how that model changes while workers run."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, Field

from distributed_state import CorruptState, InvalidValue, Schema, SchemaMismatch


class Trip(BaseModel):
    destination: str
    nights: int = Field(default=1, ge=1)
    start: date | None = None
    stops: list[str] = []
    questions: int = 0


async def test_a_planner_works_on_a_model(store: Any) -> None:
    session = store.session("trip-7", user="ada", schema=Trip)
    await session.create(Trip(destination="Lisbon"))

    async with session.edit() as trip:
        trip.nights = 4
        trip.stops.append("Sintra")
    assert (await session.history())[-1].set == {"nights": 4, "stops": ["Sintra"]}, "only what changed was written"

    trip = await session.load()
    assert (trip.destination, trip.nights, trip.start) == ("Lisbon", 4, None)

    # The methods of a plain session speak JSON; each field is checked against the model.
    await session.set("start", date(2031, 5, 2))
    assert await session.get("start") == "2031-05-02"
    assert await session.increment("questions") == 1
    assert await session.append_to("stops", "Évora") > 0
    await session.append({"role": "user", "content": "and a day at the sea?"})

    # Two workers who change one trip at once: `modify` repeats on what the other left.
    longer = await session.modify(lambda trip: trip.model_copy(update={"nights": trip.nights + 1}))
    assert longer.nights == 5


async def test_what_does_not_fit_is_refused_before_anything_is_sent(store: Any) -> None:
    session = store.session("trip-8", schema=Trip)
    await session.create({"destination": "Oslo"})
    version = await session.version()
    with pytest.raises(InvalidValue, match=r"nights: Input should be greater than or equal to 1 \(given a int\)"):
        await session.set("nights", 0)
    with pytest.raises(InvalidValue, match="'nigths': Trip has no such field"):
        await session.set("nigths", 3)
    with pytest.raises(InvalidValue, match=r"stops\.0: Input should be a valid string \(given a int\)"):
        async with session.edit() as trip:
            trip.nights = 2
            trip.stops.append(7)
    assert await session.version(fresh=True) == version

    await store.session("trip-8").set("nights", "a few")  # a handle without schema may do this
    with pytest.raises(CorruptState, match=r"nights: .* \(given a str\)") as refused:
        await session.load(fresh=True)
    assert refused.value.field == "nights"


class Place(BaseModel):
    city: str
    nights: int = 1


class Tour(BaseModel):
    """The third version of a trip: several places, and a budget."""

    places: list[Place]
    start: date | None = None
    questions: int = 0
    budget: float | None = None


def several_places(fields: dict[str, Any]) -> dict[str, Any]:
    nights = fields.pop("nights", 1)
    cities = [fields.pop("destination"), *fields.pop("stops", [])]
    return {**fields, "places": [{"city": city, "nights": nights if city == cities[0] else 1} for city in cities]}


def budget_in_euros(fields: dict[str, Any]) -> dict[str, Any]:
    cents = fields.pop("budget_cents", None)
    return {**fields, "budget": None if cents is None else cents / 100}


TOUR = Schema(Tour, version=3, upcasters={1: several_places, 2: budget_in_euros})


async def test_the_model_changes_while_old_workers_still_run(store: Any) -> None:
    old = store.session("trip-9", schema=Trip)
    await old.create(Trip(destination="Lisbon", nights=4, stops=["Sintra"]))

    new = store.session("trip-9", schema=TOUR)
    tour = await new.load()  # brought up on the way; nothing is written yet
    assert tour.places == [Place(city="Lisbon", nights=4), Place(city="Sintra")]
    await old.set("nights", 5)  # so the old worker goes on

    async with new.edit() as tour:
        tour.budget = 900.0
    assert [change.kind for change in (await new.history())[-2:]] == ["upcast", "edit"]

    # From now on the record is of version 3. An older worker can neither misread it nor half overwrite it.
    for call in (old.load, lambda: old.set("nights", 6)):
        with pytest.raises(SchemaMismatch, match="of schema version 3, this worker knows Trip version 1"):
            await call()
    assert (await new.load()).places[0].nights == 5


async def test_all_records_at_once(store: Any) -> None:
    """As `distributed-state upcast my_agent.state:TOUR` does."""
    for number in range(5):
        await store.session(f"trip-{number}", schema=Trip).create({"destination": "Rome"})
    await store.session("trip-0", schema=TOUR).set("budget", 100)
    assert (await store.admin.upcast(TOUR, dry_run=True)).upcast == 4
    done = await store.admin.upcast(TOUR)
    assert (done.upcast, done.unchanged, done.failed) == (4, 1, 0)
    assert (await store.admin.upcast(TOUR)).unchanged == 5
    assert (await store.session("trip-4", schema=TOUR).load()).places == [Place(city="Rome")]
