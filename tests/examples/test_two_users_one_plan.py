"""Example: Ana and Ben plan one trip with one agent, from two browsers and so from two servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distributed_state import Transaction
from distributed_state.merge import maximum, union

# What becomes of a field that both changed at once. Fields that only one of them changed need no policy.
TOGETHER = {
    "cities": union,  # whatever either added stays, whatever either removed goes
    "budget": maximum,  # the more generous of both
    "days": lambda base, theirs, mine: theirs + mine - (base or 0),  # each adds to it
}


def anas_wishes(plan: Transaction) -> None:
    plan["cities"].append("Lisbon")
    plan["budget"] = max(plan["budget"], 900)
    plan["days"] += 2
    plan["hotel"] = "by the sea"
    plan.append({"role": "user", "name": "ana", "content": "Two days in Lisbon, by the sea!"})


def bens_wishes(plan: Transaction) -> None:
    plan["cities"] = [city for city in plan["cities"] if city != "Paris"] + ["Madrid"]
    plan["budget"] = max(plan["budget"], 700)
    plan["days"] += 3
    plan["train"] = True
    plan.append({"role": "user", "name": "ben", "content": "Madrid by train, and no Paris."})


@pytest.mark.replicas
async def test_two_users_edit_one_plan_at_the_same_time(opener: Any) -> None:
    here, there = await opener(), await opener()
    await here.session("trip", user="ana").write(set={"cities": ["Paris"], "budget": 500, "days": 0}, phase="planning")

    async def ana() -> None:
        with here.acting_as("user:ana"):
            await here.session("trip").apply(anas_wishes, merge=TOGETHER)

    async def ben() -> None:
        with there.acting_as("user:ben"):
            await there.session("trip").apply(bens_wishes, merge=TOGETHER)

    await asyncio.gather(ana(), ben())

    trip = here.session("trip")
    plan = await trip.get_all(fresh=True)
    assert sorted(plan.pop("cities")) == ["Lisbon", "Madrid"]
    assert plan == {"budget": 900, "days": 5, "hotel": "by the sea", "train": True}
    assert {message.name for message in await trip.messages()} == {"ana", "ben"}
    # Each wish is one commit with its author.
    assert {change.actor for change in await trip.history(after=1)} == {"user:ana", "user:ben"}
    [bens] = [change for change in await trip.history() if change.actor == "user:ben"]
    assert bens.set["train"] is True
    assert [message.content for message in bens.appended] == ["Madrid by train, and no Paris."]


@pytest.mark.replicas
async def test_one_of_them_closes_the_plan(opener: Any) -> None:
    """A phase that was moved is nothing that fields can be merged with: the change looks at the plan again."""
    here, there = await opener(), await opener()
    await here.session("trip").write(set={"budget": 500}, phase="planning")

    def raise_budget(plan: Transaction) -> str:
        if plan.phase == "booked":
            return "too late"
        plan["budget"] += 100
        return "raised"

    async def close() -> None:
        await there.session("trip").write(set={"budget": 450}, phase="booked", expect_phase="planning")

    answer, _ = await asyncio.gather(here.session("trip").apply(raise_budget, merge=TOGETHER), close())
    budget = await here.session("trip").get("budget", fresh=True)
    assert (answer, budget) in {("too late", 450), ("raised", 450)}
