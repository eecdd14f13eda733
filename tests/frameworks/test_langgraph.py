"""LangGraph's saver and store on ours: the conformance package, LangGraph's own tests, and what only we promise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any

import pytest
from controls import sabotage
from following import plain, shown
from frameworks import theirs
from frameworks.examples import run_examples
from frameworks.langgraph_crew import State, config_of, graph_on, think
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.conformance import validate
from langgraph.checkpoint.conformance.capabilities import ALL_CAPABILITIES
from langgraph.checkpoint.conformance.initializer import checkpointer_test
from langgraph.config import get_stream_writer
from langgraph.graph import MessagesState, StateGraph
from langgraph.store.base import PutOp

from distributed_state import (
    AsyncStateStore,
    ConfigurationError,
    Conflict,
    Encryption,
    InvalidValue,
    KeyRing,
    Locked,
    StateStore,
)
from distributed_state.adapters.langgraph import DistributedStateSaver, DistributedStateStore, stream
from distributed_state.results import Chunk

# Of the archive of langgraph: what persists. Streams, retries, remote graphs and the like only have a saver at hand.
PERSISTENCE = (
    "test_channels", "test_checkpoint_migration", "test_delta_channel_exit_mode", "test_delta_channel_fork",
    "test_delta_channel_id_stability", "test_delta_channel_migration", "test_delta_channel_node_cache",
    "test_delta_channel_parallel_order", "test_delta_channel_run_input", "test_delta_channel_seal_subscribers",
    "test_delta_channel_subgraph", "test_delta_channel_supersteps_bound", "test_delta_channel_to_plain",
    "test_delta_channel_update_overwrite", "test_delta_channel_update_state", "test_delta_channel_write_failures",
    "test_interrupt_migration", "test_interrupt_state", "test_interruption", "test_large_cases",
    "test_large_cases_async", "test_messages_state", "test_parent_command", "test_parent_command_async",
    "test_pregel", "test_pregel_async", "test_pregel_debug", "test_strict_resume", "test_subgraph_detection",
    "test_subgraph_persistence", "test_subgraph_persistence_async", "test_time_travel", "test_time_travel_async",
)  # fmt: skip
PASSED = 825
APART = {
    "test_channels.py::test_delta_channel_snapshot_version_based": "it looks into the memory saver's own dict of blobs",
    "test_pregel_async.py::test_imp_nested": "one task must be written before another one has slept for 10 ms",
}
WITH_PARAMETERS = 4  # the first is one test, the second three

# Of the archive of langgraph-checkpoint-postgres: its store and delta channels.
POSTGRES = ("test_store", "test_async_store", "test_delta_pagination", "test_delta_plain_value_seed")
POSTGRES_PASSED = 59
POSTGRES_APART = {
    "vector or embed or scores or non_ascii or sorting": "vectors: ours are of the store's search, not of `index=`",
    "migration or escape or pattern": "they test SQL statements",
    "omit_expired": "they put values out of date by SQL",
    "no_running_loop": "theirs refuses blocking calls on a running loop, ours serves them",
    "single_pool_checkout or reads_nothing_newer": "they count statements",
    "inline_primitive_seed": "to theirs None is no value, to ours and to LangGraph's memory saver it is one",
    "large_batches": "they take half a minute, for many equal writes",
}


def files(names: tuple[str, ...]) -> list[str]:
    return [f"tests/{each}.py" for each in names]


@pytest.fixture
def place(redis_url: str, tmp_path: Path, namespace: str) -> dict[str, str]:
    """Where our stores are, in runs of theirs."""
    archive = f"sqlite:///{tmp_path}/archive.db"
    return {"WARM": redis_url, "ARCHIVE": archive, "NAMESPACE": namespace, "NO_DOCKER": "true", "ADAPTER": "ours"}


@pytest.mark.timeout(500)
def test_langgraphs_own_tests_of_persistence_pass(
    archive: Callable[[str], Path], place: dict[str, str], tmp_path: Path
) -> None:
    apart = [f"tests/{name}" for name in APART]
    ended = theirs.run(
        archive("langgraph"), files(PERSISTENCE), plugin="langgraph_plugin", made=tmp_path / "made.json",
        environment=place, apart=apart, options=["-o", "addopts="],
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert (len(ended.outcomes), len(ended.named("passed"))) == (PASSED, PASSED), ended.printed


@pytest.mark.timeout(500)
def test_as_many_pass_on_their_own_in_memory(archive: Callable[[str], Path], tmp_path: Path) -> None:
    """The control: our plugin chooses, and nothing is left out but what is named."""
    ended = theirs.run(
        archive("langgraph"), files(PERSISTENCE), plugin="langgraph_plugin", made=tmp_path / "made.json",
        environment={"NO_DOCKER": "true", "ADAPTER": "theirs"}, options=["-o", "addopts="],
    )  # fmt: skip
    assert len(ended.named("passed")) == len(ended.outcomes) == PASSED + WITH_PARAMETERS, ended.printed


@pytest.mark.timeout(500)
def test_the_tests_of_their_postgres_store_and_delta_channels_pass(
    archive: Callable[[str], Path], place: dict[str, str], tmp_path: Path
) -> None:
    apart = ["-o", "addopts=", "-o", "asyncio_mode=auto", "-k", f"not ({' or '.join(POSTGRES_APART)})"]
    ended = theirs.run(
        archive("langgraph-checkpoint-postgres"), files(POSTGRES), plugin="langgraph_postgres_plugin",
        made=tmp_path / "made.json", environment=place, options=apart,
    )  # fmt: skip
    assert ended.named("failed") == set(), ended.printed
    assert (len(ended.outcomes), len(ended.named("passed"))) == (POSTGRES_PASSED, POSTGRES_PASSED), ended.printed


@pytest.mark.parametrize("archive_url", ["postgres"], indirect=True)
def test_every_capability_of_the_conformance_package_is_there(redis_url: str, archive_url: str, namespace: str) -> None:
    @checkpointer_test(name="DistributedStateSaver")
    async def ours() -> Any:
        settings = {"archive": archive_url, "namespace": namespace}
        async with DistributedStateSaver.from_conn_string(redis_url, **settings) as saver:
            yield saver

    report = asyncio.run(validate(ours))
    assert {name for name, each in report.results.items() if each.passed} == {each.value for each in ALL_CAPABILITIES}


# What only we promise


@pytest.fixture
def settings(redis_url: str, tmp_path: Path, namespace: str) -> dict[str, Any]:
    return {"url": redis_url, "archive": f"sqlite:///{tmp_path}/archive.db", "namespace": namespace}


@pytest.fixture
def savers(settings: dict[str, Any]) -> Iterator[tuple[DistributedStateSaver, DistributedStateSaver]]:
    """Those of two workers."""
    with StateStore.open(**settings) as one, StateStore.open(**settings) as other:
        yield DistributedStateSaver(one), DistributedStateSaver(other)


def overtaken(mine: DistributedStateSaver, other: DistributedStateSaver) -> tuple[Any, Any]:
    """Two graphs of one thread; while the first runs a turn, the second runs one whole."""
    first, second = graph_on(mine), graph_on(other)
    first.invoke({"log": ["hello"]}, config_of("t"))
    read = mine.get_tuple

    def and_be_overtaken(config: Any) -> Any:
        found = read(config)
        mine.get_tuple = read  # type: ignore[method-assign]
        second.invoke({"log": ["faster"]}, config_of("t"))
        return found

    mine.get_tuple = and_be_overtaken  # type: ignore[method-assign]
    return first, second


def test_a_run_that_is_behind_is_refused_and_the_other_turn_stays(savers: Any) -> None:
    first, second = overtaken(*savers)
    with pytest.raises(Conflict, match="was continued by another run meanwhile"):
        first.invoke({"log": ["slower"]}, config_of("t"))
    assert second.get_state(config_of("t")).values["log"] == ["hello", "re:hello", "faster", "re:faster"]
    first.invoke({"log": ["slower"]}, config_of("t"))
    assert first.get_state(config_of("t")).values["log"][-4:] == ["faster", "re:faster", "slower", "re:slower"]


def test_without_what_is_expected_the_other_turn_would_be_lost(savers: Any) -> None:
    """The control of the test above: a script that compares nothing."""
    with sabotage("commit", "wanted ~= '+' and wanted ~= '+' .. stored", "false"):
        first, _ = overtaken(*savers)
        first.invoke({"log": ["slower"]}, config_of("t"))
        assert first.get_state(config_of("t")).values["log"] == ["hello", "re:hello", "slower", "re:slower"]


def test_who_names_a_checkpoint_makes_a_branch_however_far_the_thread_went_on(savers: Any) -> None:
    mine, other = savers
    graph = graph_on(mine)
    graph.invoke({"log": ["one"]}, config_of("t"))
    graph.invoke({"log": ["two"]}, config_of("t"))
    old = next(each for each in graph.get_state_history(config_of("t")) if each.values["log"] == ["one", "re:one"])
    graph_on(other).invoke({"log": ["three"]}, config_of("t"))
    branch = graph.invoke({"log": ["instead"]}, old.config)
    assert branch["log"] == ["one", "re:one", "instead", "re:instead"]
    assert graph_on(other).get_state(config_of("t")).values == branch
    updated = graph.update_state(old.config, {"log": ["by hand"]})
    assert graph.get_state(updated).values["log"] == ["one", "re:one", "by hand"]


def test_saving_and_reading_the_newest_take_one_script_each(savers: Any, redis_url: str) -> None:
    import redis

    mine, other = savers
    graph = graph_on(mine)
    graph.invoke({"log": ["one"]}, config_of("t"))
    other.get_tuple(config_of("x"))
    with redis.Redis.from_url(redis_url) as client:

        def scripts() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        saved = mine.get_tuple(config_of("t"))
        for saver in (mine, other):
            before = scripts()
            assert saver.get_tuple(config_of("t")).checkpoint == saved.checkpoint
            assert scripts() - before <= 2  # the archiver or a link may have run one meanwhile


def test_an_exclusive_saver_saves_only_what_is_held(settings: dict[str, Any]) -> None:
    with StateStore.open(**settings) as store:
        saver = DistributedStateSaver(store, exclusive=True)
        graph = graph_on(saver)
        with pytest.raises(Locked, match=r"saver\.turn"):
            graph.invoke({"log": ["one"]}, config_of("t"))
        with saver.turn(config_of("t")):
            graph.invoke({"log": ["two"]}, config_of("t"))
            with StateStore.open(**settings) as other, pytest.raises(Locked):
                DistributedStateSaver(other).turn(config_of("t"), wait=0.1).__enter__()
        assert graph.get_state(config_of("t")).values["log"] == ["two", "re:two"]

        async def run() -> Any:
            async with saver.turn(config_of("t")):
                return await graph.ainvoke({"log": ["three"]}, config_of("t"))

        assert asyncio.run(run())["log"][-1] == "re:three"


def test_a_turn_gives_the_answer_to_a_repeated_request_and_begins_a_deleted_thread_again(
    savers: tuple[DistributedStateSaver, DistributedStateSaver],
) -> None:
    def answered(saver: DistributedStateSaver, request: str) -> tuple[bool, Any]:
        with saver.turn(config_of("t"), request_id=request) as turn:
            if not turn.repeated:
                turn.outcome = graph_on(saver).invoke({"log": [request]}, config_of("t"))["log"]
        return turn.repeated, turn.outcome

    one, other = savers
    assert answered(one, "r1") == (False, ["r1", "re:r1"])
    assert answered(other, "r1") == (True, ["r1", "re:r1"])
    one.delete_thread("t")
    assert answered(other, "r2") == (False, ["r2", "re:r2"])
    assert graph_on(one).get_state(config_of("t")).values["log"] == ["r2", "re:r2"]


@pytest.mark.parametrize("exclusive", [True, False])
def test_nodes_that_run_at_the_same_time_save_under_the_turn(settings: dict[str, Any], exclusive: bool) -> None:
    """LangGraph saves what they wrote from the threads in which they ran, outside of the run's context."""
    with StateStore.open(**settings) as store:
        saver = DistributedStateSaver(store, exclusive=exclusive)
        builder = StateGraph(State)
        for name in ("one", "two", "three"):
            builder.add_node(name, think)
            builder.add_edge("__start__", name)
        graph = builder.compile(checkpointer=saver)
        for asked in ("a", "b", "c"):
            with saver.turn(config_of("t")) if exclusive or asked == "b" else nullcontext():
                assert graph.invoke({"log": [asked]}, config_of("t"))["log"] == [asked]
                assert graph.invoke({"log": ["and"]}, config_of("t"))["log"] == [asked, "and"]
            saver.delete_thread("t")

        async def run() -> Any:
            async with saver.turn(config_of("t")):
                return await graph.ainvoke({"log": ["d"]}, config_of("t"))

        assert asyncio.run(run())["log"] == ["d"]


def test_a_run_of_a_repeated_request_does_not_hold_its_thread(settings: dict[str, Any]) -> None:
    with StateStore.open(**settings) as store:
        saver = DistributedStateSaver(store, exclusive=True)
        for _ in "twice":
            with saver.turn(config_of("t"), request_id="r1") as turn:
                if turn.repeated:
                    with pytest.raises(Locked):
                        graph_on(saver).invoke({"log": ["again"]}, config_of("t"))
                else:
                    turn.outcome = "done"
        assert turn.repeated


def test_both_apis_are_one_object_on_any_loop(settings: dict[str, Any]) -> None:
    async def both() -> Any:
        async with AsyncStateStore.open(**settings) as store:
            graph = graph_on(DistributedStateSaver(store))
            await graph.ainvoke({"log": ["one"]}, config_of("t"))
            graph.invoke({"log": ["two"]}, config_of("t"))  # blocking, on a running loop
            found = await asyncio.to_thread(graph.invoke, {"log": ["three"]}, config_of("t"))
            return found, [each async for each in graph.aget_state_history(config_of("t"))]

    found, history = asyncio.run(both())
    assert found["log"] == ["one", "re:one", "two", "re:two", "three", "re:three"]
    assert len(history) == 12


def test_what_is_stored_is_encrypted_and_what_is_deleted_is_erased(settings: dict[str, Any]) -> None:
    import redis

    keys = KeyRing({"k": os.urandom(32)})
    with StateStore.open(encryption=Encryption(keys), **settings) as store:
        saver = DistributedStateSaver(store)
        graph = graph_on(saver)
        graph.invoke({"log": ["secret words"]}, config_of("t"))
        store.admin.archive()
        file = Path(settings["archive"].removeprefix("sqlite:///"))
        with redis.Redis.from_url(settings["url"]) as client:
            kept = [client.dump(key) or b"" for key in client.scan_iter(f"{settings['namespace']}:*")]
        assert not any(b"secret words" in each for each in [*kept, file.read_bytes()])
        saver.delete_thread("t")
        assert graph.get_state(config_of("t")).values == {}
        assert store.session("langgraph/t").history() == []
        graph.invoke({"log": ["afresh"]}, config_of("t"))
        assert graph.get_state(config_of("t")).values["log"] == ["afresh", "re:afresh"]


def test_a_copy_costs_nothing_and_goes_its_own_way(savers: Any) -> None:
    mine, other = savers
    graph = graph_on(mine)
    for turn in range(5):
        graph.invoke({"log": [f"{turn}" * 2000]}, config_of("a"))
    mine.copy_thread("a", "b")
    graph_on(other).invoke({"log": ["b"]}, config_of("b"))
    assert len(list(graph.get_state_history(config_of("a")))) == 20
    assert len(list(graph.get_state_history(config_of("b")))) == 24
    mine.prune(["b"])
    assert len(list(graph.get_state_history(config_of("b")))) == 1
    assert len(graph.get_state(config_of("b")).values["log"]) == 12
    mine.delete_thread("a")
    assert len(graph_on(other).get_state(config_of("b")).values["log"]) == 12


def test_memories_are_found_by_prefix_and_filter_and_go_after_their_time(settings: dict[str, Any]) -> None:
    with StateStore.open(**settings) as store:
        memories = DistributedStateStore(store)
        memories.put(("users", "u1"), "seat", {"train": "window", "price": 3}, ttl=0.02)
        memories.put(("users", "u2"), "seat", {"train": "aisle", "price": 5})
        memories.put(["users", "u2", "trips"], "oslo", {"price": 7})  # type: ignore[arg-type]
        with StateStore.open(**settings) as other:
            seen = DistributedStateStore(other)
            assert [each.key for each in seen.search(("users", "u2"))] == ["oslo", "seat"]
            assert [each.value["price"] for each in seen.search(("users",), filter={"price": {"$gte": 5}})] == [7, 5]
            assert seen.list_namespaces(max_depth=2) == [("users", "u1"), ("users", "u2")]
            seen.put(("users", "u2"), "seat", {"train": "window"})
        item = memories.get(("users", "u2"), "seat")
        assert item is not None
        assert item.value == {"train": "window"}
        assert item.created_at < item.updated_at
        first = memories.get(("users", "u1"), "seat", refresh_ttl=False)
        assert first is not None
        deadline = asyncio.run(_gone(memories))
        assert deadline
        assert memories.sweep_ttl() == 1


def test_a_query_without_a_search_warns_once(settings: dict[str, Any]) -> None:
    """On servers whose store has none, it would return the newest values as if they were found."""
    with StateStore.open(**settings, search=False) as store:
        memories = DistributedStateStore(store)
        memories.put(("users",), "k", {"a": 1})
        with pytest.warns(UserWarning, match=r"search\(query=...\) ignores its query .*search=True"):
            assert [each.key for each in memories.search(("users",), query="words")] == ["k"]
        assert [each.key for each in memories.search(("users",), query="words")] == ["k"], "once"
        memories.search(("users",))
    with StateStore.open(**settings, search=True) as store:
        memories = DistributedStateStore(store)
        memories.put(("users",), "found", {"said": "a sauna in Oslo"})
        assert [each.key for each in memories.search(("users",), query="sauna")] == ["found"]


def test_an_index_becomes_the_stores_search_or_is_an_error_that_says_so(settings: dict[str, Any]) -> None:
    index: Any = {"dims": 3, "embed": lambda texts: [[1.0, 2.0, float(len(each))] for each in texts]}
    with (
        StateStore.open(**settings) as store,
        pytest.raises(ConfigurationError, match=r"search=Search\(embed=function, dimensions=number\)"),
    ):
        DistributedStateStore(store, index=index)
    opening = DistributedStateStore.from_conn_string(archive="memory", index=index)
    search = opening._asked["search"]
    assert search.dimensions == 3
    assert asyncio.run(search.embed(["ab"])) == [[1.0, 2.0, 2.0]]
    with pytest.raises(ConfigurationError, match="pgvector"), opening:
        pass


def test_memories_of_an_owner_are_forgotten_with_it(settings: dict[str, Any]) -> None:
    def owner(namespace: tuple[str, ...]) -> str | None:
        return namespace[1] if namespace[0] == "users" else None

    with StateStore.open(**settings, search=True) as store, StateStore.open(**settings, search=True) as elsewhere:
        memories, other = (DistributedStateStore(each, owner=owner) for each in (store, elsewhere))
        memories.batch([
            PutOp(("users", "ada"), "k", {"likes": "rain"}, ttl=10),
            PutOp(("users", "ada", "trips"), "k", {"likes": "rain"}),
            PutOp(("users", "bob"), "k", {"likes": "rain"}),
            PutOp(("all",), "k", {"likes": "rain"}),
        ])  # fmt: skip
        assert len(other.search((), query="rain")) == 4
        elsewhere.forget("ada")
        for seen in memories, other:
            assert seen.list_namespaces() == [("all",), ("users", "bob")]
            assert seen.get(("users", "ada"), "k") is None
            assert len(seen.search((), query="rain")) == 2
        memories.batch([PutOp(("users", "ada"), "k", {"likes": "snow"}), PutOp(("users", "bob"), "l", {"a": 1})])
        found = other.get(("users", "ada"), "k")
        assert found is not None
        assert found.value == {"likes": "snow"}
        store.forget("ada")
        other.delete(("users", "ada"), "k")
        assert other.list_namespaces(prefix=("users",)) == [("users", "bob")]
        # The control: without an owner they stay.
        DistributedStateStore(store, prefix="shared/").put(("users", "ada"), "k", {"likes": "rain"})
        store.forget("ada")
        assert len(DistributedStateStore(store, prefix="shared/").search(("users",))) == 1


def test_a_value_may_have_any_name(settings: dict[str, Any]) -> None:
    """Those of ours, too; what an earlier release stored under names like ours is read as it was."""
    with StateStore.open(**settings) as store:
        memories = DistributedStateStore(store)
        value = {"#langgraph": 1, "##langgraph": [2], "a": 3}
        memories.put(("users",), "k", value, ttl=10)
        store.app("langgraph-store/users.").items("items").put(
            "old", {"##langgraph": [2], "#langgraph": [1.0, 2.0, None, 2.0, True]}
        )
        for seen in (memories, DistributedStateStore(store)):
            assert [each.value for each in seen.search(("users",))] == [value, {"##langgraph": [2]}]
            assert [each.key for each in seen.search(("users",), filter={"#langgraph": 1})] == ["k"]
            found = seen.get(("users",), "k")
            assert found is not None
            assert found.value == value


def test_namespaces_that_hold_nothing_are_not_listed(settings: dict[str, Any]) -> None:
    with StateStore.open(**settings) as store:
        memories = DistributedStateStore(store)
        with pytest.raises(InvalidValue, match=r"namespace \('refused', 'x'\): item items k\['a'\]: an object is not"):
            memories.put(("refused", "x"), "k", {"a": object()})
        directory = store.app("langgraph-store/").items("namespaces")
        assert directory.list().items == (), "what is refused leaves nothing behind"
        for name in ("emptied", "kept"):
            memories.put((name, "x"), "k", {"a": 1})
        for number in range(30):
            memories.put(("brief", "x"), f"{number:02}", {"a": 1}, ttl=0.0001)
        memories.put(("brief", "y"), "k", {"a": 1})
        memories.delete(("emptied", "x"), "k")
        deadline = time.monotonic() + 10
        while memories.get(("brief", "x"), "29", refresh_ttl=False) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert memories.list_namespaces() == [("brief", "y"), ("kept", "x")]
        assert memories.list_namespaces(max_depth=1, limit=1, offset=1) == [("kept",)]
        memories.put(("emptied", "x"), "k", {"a": 1})
        assert memories.list_namespaces(prefix=("emptied",)) == [("emptied", "x")]
        assert len(directory.list().items) == 4


@pytest.mark.parametrize("named", [{}, {"thread_id": None}])
def test_runs_that_name_no_thread_are_refused_and_not_one_thread(settings: dict[str, Any], named: Any) -> None:
    """`str(None)` is a name like any other: whoever forgot the id would read what others said who forgot it."""
    with StateStore.open(**settings) as store:
        graph = graph_on(DistributedStateSaver(store))
        with pytest.raises(InvalidValue, match="'thread_id'"):
            graph.invoke({"log": ["one"]}, {"configurable": {"a": 1, **named}})
        assert list(store.sessions(fresh=True)) == []


def test_a_run_that_begins_a_thread_says_whose_it_is(settings: dict[str, Any]) -> None:
    with StateStore.open(**settings) as store, StateStore.open(**settings) as other:
        graph = graph_on(DistributedStateSaver(store, user="user_id"))
        with pytest.raises(InvalidValue, match=r"would begin without an owner: with user='user_id'"):
            graph.invoke({"log": ["one"]}, config_of("t"))
        assert not store.session("langgraph/t").exists()
        graph.invoke({"log": ["one"]}, {"configurable": {"thread_id": "t", "user_id": "ada"}})
        # Whoever is given a config by LangGraph goes on with it: it names no owner, and there is one.
        for saver in (DistributedStateSaver(each, user="user_id") for each in (store, other)):
            again = graph_on(saver)
            oldest = list(again.get_state_history(config_of("t")))[-1]
            again.invoke({"log": ["two"]}, again.update_state(oldest.config, {"log": ["by hand"]}))
        assert [row.id for row in store.sessions(user="ada", fresh=True)] == ["langgraph/t"]
        store.forget("ada")
        assert graph.get_state(config_of("t")).values == {}


@pytest.mark.parametrize("shown", [DistributedStateSaver, DistributedStateStore])
def test_the_examples_are_true(shown: type) -> None:
    assert asyncio.run(run_examples(shown, **{shown.__name__: shown})) == 1


async def _gone(memories: DistributedStateStore) -> bool:
    """Wait until a value is past its time."""
    for _ in range(400):
        if await memories.aget(("users", "u1"), "seat", refresh_ttl=False) is None:
            return True
        await asyncio.sleep(0.02)
    return False


# Streaming a run


async def each_of(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


def test_a_graph_shows_text_and_the_parts_of_all_modes_as_json_in_blocking_code_too() -> None:
    calls = [{"name": "book", "args": {"city": "Oslo"}, "id": "c1"}]

    def ask(state: Any) -> Any:
        get_stream_writer()({"steps": {1, 2}, "at": datetime(2026, 1, 2), "size": nan})
        return {"messages": [AIMessage("I book.", tool_calls=calls, id="m1"), ToolMessage("done", tool_call_id="c1")]}

    builder = StateGraph(MessagesState)
    builder.add_node("ask", ask)
    builder.set_entry_point("ask")
    with StateStore.open(archive="memory") as store:
        saver = DistributedStateSaver(store, exclusive=True)
        graph = builder.compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "t"}, "metadata": {"plan": "xyzzy"}}
        with saver.turn(config, request_id="r") as turn:
            asked = {"messages": [("user", "Book!")]}
            modes = ["messages", "updates", "custom"]
            said = stream(turn, graph.stream(asked, config, stream_mode=modes, version="v2"))
            yielded = list(said)
            turn.outcome = said.text
        parts = [part.data for part in store.session("langgraph/t").output("r", wait=5) if isinstance(part, Chunk)]
    assert [part["type"] for part in yielded] == ["custom", "messages", "messages", "updates"]
    assert said.text == "I book."
    custom, text, called, result, update = parts
    assert custom == {"type": "custom", "ns": [], "data": {"steps": [1, 2], "at": "2026-01-02T00:00:00", "size": None}}
    assert text == "I book."
    assert (called["type"], called["node"], called["data"]["tool_calls"][0]["args"]) == (
        "messages", "ask", {"city": "Oslo"}
    )  # fmt: skip
    assert (result["data"]["type"], result["data"]["content"]) == ("tool", "done")
    assert [each["id"] for each in update["data"]["ask"]["messages"]][:1] == ["m1"]
    assert "xyzzy" in str(yielded)
    assert "xyzzy" not in str(parts), "what a run is configured with is not for those who follow it"


async def test_a_graph_streams_only_parts_that_name_their_mode() -> None:
    async with AsyncStateStore.open(archive="memory") as store, store.session("s").turn() as turn:
        with pytest.raises(InvalidValue, match="v2"):
            [_ async for _ in stream(turn, each_of(("updates", {})))]


async def test_a_part_that_cannot_be_shown_is_replaced_by_a_note_and_the_run_goes_on() -> None:
    endless: dict[str, Any] = {"type": "custom"}
    endless["data"] = endless
    large = {"type": "custom", "data": "x" * 300_000}
    async with AsyncStateStore.open(archive="memory") as store:
        async with store.session("s").turn(request_id="r") as turn:
            yielded = [part async for part in stream(turn, each_of(endless, large, {"type": "custom"}))]
            turn.outcome = "done"
        parts = plain(await shown(store.session("s"), "r"))
    assert len(yielded) == 3
    assert [list(part) for part in parts[:2]] == [["omitted"], ["omitted"]]
    assert parts[2:] == [{"type": "custom"}, ("Ended", 1, "done")]
