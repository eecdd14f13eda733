"""CrewAI: what its persistence does, ours beside its SQLite; and what only ours does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from crewai.flow.async_feedback import HumanFeedbackPending, PendingFeedbackContext
from crewai.flow.flow import Flow, FlowState, listen, start
from crewai.flow.human_feedback import human_feedback
from crewai.flow.persistence import SQLiteFlowPersistence, persist
from frameworks.examples import run_examples
from pydantic import BaseModel

from distributed_state import ConfigurationError, Deleted, StateStore
from distributed_state.adapters.crewai import TAG, DistributedFlowPersistence

pytestmark = pytest.mark.only(api="asyncio")
KINDS = ("ours", "theirs")
CONTEXT = PendingFeedbackContext(
    flow_id="f", flow_class="x.Y", method_name="review", method_output={"draft": [1, None]}, message="Fine?",
    emit=["yes", "no"], default_outcome="no", metadata={"k": {"v": 1.5}}, llm={"model": "m"}, trace_context=(1, 2),
)  # fmt: skip


async def made(kind: str, opener: Any, tmp_path: Path) -> Any:
    return DistributedFlowPersistence(await opener()) if kind == "ours" else SQLiteFlowPersistence(f"{tmp_path}/f.db")


class Inner(BaseModel):
    names: list[str] = []


class Trip(FlowState):
    city: str = ""
    nights: int = 0
    inner: Inner = Inner()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_state_is_read_as_it_was_saved(kind: str, opener: Any, tmp_path: Path) -> None:
    persistence = await made(kind, opener, tmp_path)
    assert persistence.load_state("f") is None
    state = {"id": "f", "": None, "deep": {"x": [1, 1.0, True, "\u00e5"]}, "#odd": "", "a/b": 1, 5: "number"}
    persistence.save_state("f", "first", state)
    assert persistence.load_state("f") == {**{key: value for key, value in state.items() if key != 5}, "5": "number"}
    persistence.save_state("f", "second", {"id": "f", "deep": {"x": [1, 1, 1]}})
    assert repr(persistence.load_state("f")["deep"]) == "{'x': [1, 1, 1]}"
    assert persistence.load_state("f").keys() == {"id", "deep"}
    persistence.save_state("g", "first", Trip(id="g", city="Oslo", inner=Inner(names=["ada"])))
    assert persistence.load_state("g") == {"id": "g", "city": "Oslo", "nights": 0, "inner": {"names": ["ada"]}}
    persistence.save_state("h", "first", {"set": {1}, "model": Inner(), "odd": Path("x"), "tuple": (1, 2)})
    assert persistence.load_state("h") == {"set": [1], "model": {"names": []}, "odd": "x", "tuple": [1, 2]}
    persistence.save_state("i", "first", {"at": datetime(2026, 1, 1, tzinfo=UTC)})
    assert persistence.load_state("i") == {"at": "2026-01-01T00:00:00+00:00"}
    persistence.save_state("e", "first", {})
    assert persistence.load_state("e") == {}
    with pytest.raises(ValueError, match="either a Pydantic BaseModel or dict"):
        persistence.save_state("f", "third", ["no state"])


@pytest.mark.parametrize("kind", KINDS)
async def test_pending_feedback_is_saved_read_and_cleared(kind: str, opener: Any, tmp_path: Path) -> None:
    persistence = await made(kind, opener, tmp_path)
    persistence.clear_pending_feedback("f")
    assert persistence.load_pending_feedback("f") is None
    persistence.save_pending_feedback("f", CONTEXT, {"id": "f", "n": 1})
    assert persistence.load_pending_feedback("f") == ({"id": "f", "n": 1}, CONTEXT)
    assert persistence.load_state("f") == {"id": "f", "n": 1}
    persistence.save_state("f", "beside", {"id": "f", "n": 2})
    assert persistence.load_pending_feedback("f") == ({"id": "f", "n": 1}, CONTEXT)
    persistence.clear_pending_feedback("f")
    persistence.clear_pending_feedback("f")
    assert persistence.load_pending_feedback("f") is None
    assert persistence.load_state("f") == {"id": "f", "n": 2}


class Paused:
    """Whoever is asked answers later."""

    def request_feedback(self, context: PendingFeedbackContext, flow: Any) -> str:
        raise HumanFeedbackPending(context=context)


class Review(Flow[Trip]):
    @start()
    @human_feedback(message="Fine?", provider=Paused())
    def plan(self) -> str:
        self.state.city = "Oslo"
        return "a weekend in Oslo"

    @listen(plan)
    def book(self, result: Any) -> str:
        self.state.nights = 2
        return f"booked, as they said {result.feedback!r}"


@pytest.mark.replicas
async def test_a_paused_flow_is_listed_and_resumed_at_another_worker(opener: Any) -> None:
    one, other = await opener(), await opener()
    flow = Review(persistence=DistributedFlowPersistence(one, user="ada"), suppress_flow_events=True)
    asked = await flow.kickoff_async(inputs={"id": "f"})
    assert isinstance(asked, HumanFeedbackPending)
    assert [info.id for info in await other.sessions(tags=TAG, fresh=True)] == ["f"]
    persistence = DistributedFlowPersistence(other, user="ada")
    resumed = Review.from_pending("f", persistence, suppress_flow_events=True)
    assert resumed.state.city == "Oslo"
    assert await resumed.resume_async("yes") == "booked, as they said 'yes'"
    assert await other.sessions(tags=TAG, fresh=True) == []
    with pytest.raises(ValueError, match="f"):
        Review.from_pending("f", persistence)


# What only ours does


@pytest.mark.replicas
async def test_workers_that_change_other_keys_keep_both_changes(opener: Any) -> None:
    one, other = [DistributedFlowPersistence(await opener()) for _ in range(2)]
    one.save_state("f", "m", {"id": "f", "a": 0, "b": 0, "gone": 1})
    assert other.load_state("f") == one.load_state("f")
    one.save_state("f", "m", {"id": "f", "a": 1, "b": 0})
    other.save_state("f", "m", {"id": "f", "a": 0, "b": 1, "gone": 1})
    assert one.load_state("f") == {"id": "f", "a": 1, "b": 1}
    # A flow whose state was not read replaces the stored one.
    DistributedFlowPersistence(await opener()).save_state("f", "m", {"id": "f", "new": 1})
    assert one.load_state("f") == {"id": "f", "new": 1}


async def test_workers_that_begin_a_flow_at_the_same_time_keep_both_states(opener: Any) -> None:
    """Each has found none, so neither means to replace the other's."""
    one, other = DistributedFlowPersistence(await opener()), DistributedFlowPersistence(await opener())
    assert one.load_state("f") is other.load_state("f") is None
    one.save_state("f", "note", {"id": "f", "one": 1})
    other.save_state("f", "note", {"id": "f", "other": 2})
    assert one.load_state("f") == {"id": "f", "one": 1, "other": 2}


async def test_a_save_writes_only_what_changed(store: Any) -> None:
    persistence = DistributedFlowPersistence(store)
    persistence.save_state("f", "one", {"id": "f", "big": "x" * 1000, "n": 1})
    persistence.save_state("f", "two", {"id": "f", "big": "x" * 1000, "n": 2})
    newest = (await store.session("f").history())[-1]
    assert newest.set == {"state/n": 2, "crewai": {"method": "two"}}


async def test_methods_that_run_at_the_same_time_leave_the_state_of_all(store: Any) -> None:
    persistence = DistributedFlowPersistence(store)
    state: dict[str, Any] = {"id": "f"}

    def save(number: int) -> None:
        for at in range(5):
            state[f"{number}/{at}"] = at
            persistence.save_state("f", f"m{number}", state)

    await asyncio.gather(*(asyncio.to_thread(save, number) for number in range(8)))
    assert persistence.load_state("f") == state


async def test_an_erased_flow_begins_again_but_not_for_one_that_was_read(store: Any) -> None:
    persistence = DistributedFlowPersistence(store, user="ada")
    persistence.save_state("f", "m", {"id": "f", "secret": 1})
    await store.forget("ada")
    with pytest.raises(Deleted):
        persistence.save_state("f", "m", {"id": "f", "secret": 1, "n": 2})
    persistence.clear_pending_feedback("f")
    assert persistence.load_state("f") is None
    persistence.save_state("f", "m", {"id": "f"})
    assert persistence.load_state("f") == {"id": "f"}


async def test_a_persistence_made_from_its_description_has_the_store_of_its_name(opener: Any) -> None:
    one, other = await opener(), await opener()
    first, second = DistributedFlowPersistence(one), DistributedFlowPersistence(other, name="other", user="ada")
    for each in first, second:
        again = type(each).model_validate(each.model_dump(mode="json"))
        again.save_state(each.name, "m", {"id": each.name})
        assert each.load_state(each.name) == {"id": each.name}
    assert [info.id for info in await one.sessions(user="ada", fresh=True)] == ["other"]
    with pytest.raises(ConfigurationError, match="not a NoneType"):
        DistributedFlowPersistence(name="nobody's")


async def test_a_store_that_fails_fails_the_flow(opener: Any) -> None:
    store = await opener()
    persistence = DistributedFlowPersistence(store)

    @persist(persistence)
    class Short(Flow[Trip]):
        @start()
        def go(self) -> None:
            self.state.city = "Oslo"

    await Short(suppress_flow_events=True).kickoff_async()
    await store.close()
    with pytest.raises(RuntimeError, match="State persistence failed"):
        await Short(suppress_flow_events=True).kickoff_async()


async def test_the_example_runs(tmp_path: Path) -> None:
    class Planned(Flow[Trip]):
        @start()
        @persist()
        def plan(self) -> None:
            self.state.city = "Oslo"

    with StateStore.open(archive=f"sqlite:///{tmp_path}/own.db") as store:
        names = {"Trip": Planned, "DistributedFlowPersistence": DistributedFlowPersistence}
        assert await run_examples(DistributedFlowPersistence, store=store, **names) == 1


def test_who_lacks_crewai_is_told_what_to_install() -> None:
    program = "import sys; sys.modules['crewai'] = None; import distributed_state.adapters.crewai"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(": pip install 'distributed-state[crewai]'")
