"""What the LangGraph adapter promises where workers, runs and deletions meet: each test fails on a saver without it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import redis
from frameworks.langgraph_crew import State, config_of, graph_on
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import StateGraph
from langgraph.store.base import GetOp, PutOp

from distributed_state import AsyncItems, AsyncStateStore, Conflict, Deleted, StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver, DistributedStateStore


@pytest.fixture
def settings(redis_url: str, tmp_path: Path, namespace: str) -> dict[str, Any]:
    """No archiver comes in between: scripts are counted."""
    archive = f"sqlite:///{tmp_path}/archive.db"
    return {"url": redis_url, "archive": archive, "namespace": namespace, "archive_every": 3600.0}


@pytest.fixture
def store(settings: dict[str, Any]) -> Iterator[StateStore]:
    with StateStore.open(**settings) as opened:
        yield opened


@pytest.fixture
def saver(store: StateStore) -> DistributedStateSaver:
    return DistributedStateSaver(store)


@pytest.fixture
def scripts(redis_url: str) -> Iterator[Callable[[Callable[[], Any]], int]]:
    """How many scripts a call takes: the fewest of five, as heartbeats come in between."""
    with redis.Redis.from_url(redis_url) as client:

        def count() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        def of(call: Callable[[], Any]) -> int:
            found = []
            for _ in range(5):
                before = count()
                call()
                found.append(count() - before)
            return min(found)

        yield of


def put(saver: Any, config: Any, namespace: str = "", run: str | None = None) -> Any:
    """Save a checkpoint by hand."""
    place = {**config["configurable"], "checkpoint_ns": namespace}
    metadata: Any = {"source": "loop", "step": 0, "parents": {}, **({"run_id": run} if run else {})}
    return saver.put({"configurable": place}, empty_checkpoint(), metadata, {})


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_of_two_first_turns_in_one_process_one_is_refused_or_both_stay(saver: Any, durability: Any) -> None:
    for round in range(10):
        met = threading.Barrier(2)
        graph = graph_on(_Meeting(saver, met))
        config = config_of(f"t{round}")

        def turn(name: str, graph: Any = graph, config: Any = config) -> str | None:
            try:
                graph.invoke({"log": [name]}, config, durability=durability)
            except Conflict:
                return None
            return name

        with ThreadPoolExecutor(2) as pool:
            acknowledged = {name for name in pool.map(turn, ["a", "b"]) if name}
        log = graph_on(saver).get_state(config).values["log"]
        assert acknowledged, "one of them began the thread"
        assert acknowledged <= set(log)
        assert len(acknowledged) == 1


@pytest.mark.parametrize(("durability", "kept"), [("exit", False), ("sync", True)])
def test_a_run_that_was_overtaken_has_saved_nothing_if_it_saves_at_its_exit(
    saver: Any, durability: Any, kept: bool
) -> None:
    """Saved step by step, its input stays: running it again adds it a second time, as the page says."""
    config, quick = config_of("t"), graph_on(saver)

    def meanwhile(state: dict[str, Any]) -> dict[str, Any]:
        quick.invoke({"log": ["quick"]}, config)
        return {"log": ["slow answer"]}

    builder = StateGraph(State)
    builder.add_node("answer", meanwhile)
    builder.add_edge("__start__", "answer")
    with pytest.raises(Conflict):
        builder.compile(checkpointer=saver).invoke({"log": ["slow"]}, config, durability=durability)
    log = quick.get_state(config).values["log"]
    assert "re:" in log[-1]
    assert ("slow" in log) is kept
    assert "slow answer" not in log


class _Meeting:
    """A saver whose first reads return side by side."""

    def __new__(cls, saver: Any, met: threading.Barrier) -> Any:
        class Meeting(type(saver)):  # type: ignore[misc]
            def get_tuple(self, config: Any) -> Any:
                found = super().get_tuple(config)
                met.wait(10)
                return found

        made = object.__new__(Meeting)
        vars(made).update(vars(saver))
        return made


def test_a_run_that_saves_in_copies_of_its_context_begins_a_thread_once(saver: Any) -> None:
    """As LangGraph's executors do: what one copy began, another one does not begin again."""
    config = config_of("t")
    assert saver.get_tuple(config) is None
    one, other = copy_context(), copy_context()
    first = one.run(put, saver, config)
    other.run(put, saver, first)
    assert (
        saver.get_tuple(config).parent_config["configurable"]["checkpoint_id"] == first["configurable"]["checkpoint_id"]
    )


def deleting(saver: Any, config: Any, then: Callable[[], Any]) -> Any:
    """A graph whose run deletes its own thread while it answers, by the same saver, and then does this."""

    def deletes() -> None:
        saver.delete_thread(config["configurable"]["thread_id"])
        then()

    return meanwhile(saver, deletes)


def meanwhile(saver: Any, then: Callable[[], Any]) -> Any:
    """A graph whose run does this while it answers."""

    def think(state: State) -> dict[str, Any]:
        then()
        return {"log": ["the secret again"]}

    builder = StateGraph(State)
    builder.add_node("think", think)
    builder.add_node("answer", lambda state: {"log": ["re:" + state["log"][-1]]})
    builder.add_edge("__start__", "think")
    builder.add_edge("think", "answer")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("durability", ["async", "sync", "exit"])
@pytest.mark.parametrize("api", ["blocking", "asyncio"])
def test_a_run_whose_thread_is_deleted_meanwhile_brings_nothing_back(
    store: StateStore, saver: Any, api: str, durability: Any, turns: int, again: bool
) -> None:
    config, quick = config_of("t"), graph_on(saver)
    for _ in range(turns):
        quick.invoke({"log": ["a secret"]}, config)

    def begin_again() -> None:
        if again:
            copy_context().run(quick.invoke, {"log": ["hello"]}, config)

    graph = deleting(saver, config, begin_again)
    with pytest.raises((Deleted, Conflict) if again else Deleted):
        if api == "blocking":
            graph.invoke({"log": ["one more secret"]}, config, durability=durability)
        else:
            asyncio.run(graph.ainvoke({"log": ["one more secret"]}, config, durability=durability))
    expected = ["hello", "re:hello"] if again else []
    assert quick.get_state(config).values.get("log", []) == expected
    kept = store.session("langgraph/t")
    found = [each.value for name in ("checkpoints", "writes", "blobs") for each in kept.items(name).list().items]
    assert not any(b"secret" in each for each in found)
    assert bool(found) == again
    quick.invoke({"log": ["and on"]}, config)
    assert quick.get_state(config).values["log"] == [*expected, "and on", "re:and on"]


@pytest.mark.parametrize("expired", ["refuse", "begin again"])
@pytest.mark.parametrize("durability", ["async", "sync", "exit"])
def test_a_run_whose_thread_expires_meanwhile_saves_nothing_and_the_next_one_begins_it_again(
    settings: dict[str, Any], durability: Any, expired: str
) -> None:
    """By the setting, writes of the run would come back without the checkpoint that they belong to."""
    with StateStore.open(**settings, sweep=0.02, expired=expired) as store:
        saver, kept = DistributedStateSaver(store), store.session("langgraph/t")
        quick = graph_on(saver)
        quick.invoke({"log": ["before"]}, config_of("t"))

        def expires() -> None:
            with store.events("session.expired") as events:
                kept.set_lifetime(idle=0.001)
                events.next(timeout=20)

        with pytest.raises(Deleted, match="expired after this run") as caught:
            meanwhile(saver, expires).invoke({"log": ["hello"]}, config_of("t"), durability=durability)
        assert caught.value.expired is not None
        assert not kept.exists(fresh=True)
        assert quick.get_state(config_of("t")).values == {}
        quick.invoke({"log": ["and on"]}, config_of("t"))
        assert quick.get_state(config_of("t")).values["log"] == ["and on", "re:and on"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mine", [True, False])
def test_what_is_saved_late_under_an_old_config_is_refused(
    saver: Any, settings: dict[str, Any], mine: bool, again: bool
) -> None:
    """Whether this worker deleted the thread or another one, and whether it began again meanwhile."""
    read = graph_on(saver)
    read.invoke({"log": ["a secret"]}, config_of("t"))
    old = [read.get_state(config_of("t")).config, put(saver, read.get_state(config_of("t")).config)]
    with StateStore.open(**settings) as store:
        deleter = saver if mine else DistributedStateSaver(store)
        deleter.delete_thread("t")
        if again:
            copy_context().run(graph_on(deleter).invoke, {"log": ["hello"]}, config_of("t"))
        for config in old:
            for namespace in "", "sub:1":
                place = {**config["configurable"], "checkpoint_ns": namespace}
                place["checkpoint_map"] = {"": place["checkpoint_id"]}
                late: Any = {"configurable": place}
                saver.get_tuple(config_of("t"))  # whatever this worker knows of it
                with pytest.raises((Deleted, Conflict)):
                    saver.put(late, empty_checkpoint(), {"source": "loop", "step": 9, "parents": {}}, {})
                with pytest.raises(Deleted):
                    saver.put_writes(late, [("log", ["a secret"])], "task")
        found = store.session("langgraph/t")
        assert found.items("writes").list(prefix="sub").items == ()
        assert len(list(saver.list(config_of("t")))) == (4 if again else 0)


def test_a_run_that_found_nothing_before_the_deletion_begins_nothing_after_it(saver: Any) -> None:
    config = config_of("t")
    late = copy_context()
    assert late.run(saver.get_tuple, config) is None
    copy_context().run(put, saver, config)
    saver.delete_thread("t")
    with pytest.raises(Deleted, match="deleted after this run"):
        late.run(put, saver, config)
    with pytest.raises(Deleted):
        late.run(saver.put_writes, {"configurable": {**config["configurable"], "checkpoint_id": "1"}}, [("a", 1)], "x")
    assert late.run(saver.get_tuple, config) is None
    late.run(put, saver, config)
    assert saver.get_tuple(config) is not None


def test_a_copy_onto_a_thread_has_its_runs(saver: Any) -> None:
    put(saver, config_of("a"), run="r1")
    put(saver, config_of("b"), run="r2")
    saver.copy_thread("a", "b")
    assert len(list(saver.list(config_of("b")))) == 2
    saver.delete_for_runs(["r1"])
    assert list(saver.list(config_of("a"))) == []
    assert [each.metadata["run_id"] for each in saver.list(config_of("b"))] == ["r2"]


def test_a_copy_is_of_one_version_though_the_thread_goes_on(saver: Any) -> None:
    first = put(saver, config_of("a"))
    put(saver, config_of("b"))
    read = AsyncItems.list
    went_on: list[Any] = []

    async def and_go_on(self: Any, **asked: Any) -> Any:
        if not went_on:
            went_on.append(put(saver, first))
        return await read(self, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncItems, "list", and_go_on)
        saver.copy_thread("a", "b")
    ids = {each.config["configurable"]["checkpoint_id"] for each in saver.list(config_of("b"))}
    assert first["configurable"]["checkpoint_id"] in ids
    assert went_on[0]["configurable"]["checkpoint_id"] not in ids
    assert went_on[0]["configurable"]["checkpoint_id"] in {
        each.config["configurable"]["checkpoint_id"] for each in saver.list(config_of("a"))
    }


def test_a_thread_that_another_worker_deleted_and_that_begins_anew_is_found_by_its_run(
    saver: Any, settings: dict[str, Any]
) -> None:
    graph = graph_on(saver)
    config = {**config_of("t"), "metadata": {"run_id": "r1"}}
    put(saver, config_of("t"), run="r1")
    with StateStore.open(**settings) as other:
        DistributedStateSaver(other).delete_thread("t")
        assert graph.get_state(config).values == {}
        put(saver, config_of("t"), run="r1")
        DistributedStateSaver(other).delete_for_runs(["r1"])
    assert list(saver.list(config_of("t"))) == []


def test_the_newest_of_a_namespace_is_found_behind_any_number_that_were_removed(saver: Any) -> None:
    kept = put(saver, config_of("t"), "sub", run="kept")
    for _ in range(30):
        put(saver, config_of("t"), "sub", run="gone")
    saver.delete_for_runs(["gone"])
    found = saver.get_tuple({"configurable": {"thread_id": "t", "checkpoint_ns": "sub"}})
    assert found is not None
    assert found.config["configurable"]["checkpoint_id"] == kept["configurable"]["checkpoint_id"]


def test_saving_and_reading_the_newest_take_one_script_each(saver: Any, settings: Any, scripts: Any) -> None:
    config = [put(saver, config_of("t"))]
    assert scripts(lambda: config.append(put(saver, config[-1]))) == 1
    assert scripts(lambda: saver.get_tuple(config_of("t"))) == 1
    with StateStore.open(**settings) as other:
        cold = DistributedStateSaver(other)
        cold.get_tuple(config_of("x"))
        assert scripts(lambda: cold.get_tuple(config_of("t"))) == 1


def test_a_listing_of_one_reads_one_page_and_removing_reads_pages(saver: Any, scripts: Any) -> None:
    config = config_of("t")
    for _ in range(120):
        config = put(saver, config)
    assert scripts(lambda: list(saver.list(config_of("t"), limit=1))) <= 5
    assert scripts(lambda: saver.prune(["nobody"])) <= 3
    assert scripts(lambda: saver.prune(["t"])) <= 8
    assert len(list(saver.list(config_of("t")))) == 1


def test_a_store_that_cannot_be_used_is_closed(settings: dict[str, Any]) -> None:
    def broken(store: Any) -> Any:
        made.append(store)
        raise ValueError("no")

    made: list[Any] = []
    opening = DistributedStateSaver.from_conn_string(settings["url"], archive="memory")
    opening._make = broken  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no"):
        opening.__enter__()
    with pytest.raises(Exception, match="closed"):
        made[0].session("s").set("a", 1)


def test_a_batch_of_puts_is_one_commit_a_namespace(store: StateStore, scripts: Any) -> None:
    memories = DistributedStateStore(store)
    names = [("a",), ("b",), ("c",)]
    puts = [PutOp(name, f"k{at}", {"n": at}) for name in names for at in range(20)]
    memories.batch(puts)
    assert scripts(lambda: memories.batch(puts)) == len(names)
    found = memories.batch([GetOp(name, "k7") for name in names])
    assert [each.value for each in found if each] == [{"n": 7}] * 3  # type: ignore[union-attr]


def later(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Put the server's clock forward, as the store's says it."""
    read = AsyncStateStore.time

    async def put_forward(self: AsyncStateStore) -> float:
        return await read(self) + seconds

    patch.setattr(AsyncStateStore, "time", put_forward)


def test_what_is_past_its_time_is_so_by_the_servers_clock(
    store: StateStore, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it was used is put only when a tenth of its time is gone."""
    memories, record = DistributedStateStore(store), store.app("langgraph-store/a.")
    memories.put(("a",), "k", {"n": 1}, ttl=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)  # this worker's
        assert memories.get(("a",), "k", refresh_ttl=False) is not None
    before = record.version()
    assert memories.get(("a",), "k") is not None
    assert record.version() == before
    later(monkeypatch, 7)
    assert memories.get(("a",), "k") is not None
    assert record.version() == before + 1
    later(monkeypatch, 56)
    assert memories.get(("a",), "k", refresh_ttl=False) is not None
    later(monkeypatch, 5)
    assert memories.get(("a",), "k", refresh_ttl=False) is None
