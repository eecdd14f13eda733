"""Agents: hooks in order, state where every replica finds it, config, commands, figures."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from below import deafened, keys_of, redis_of, tiers, until
from recording_agents import Recorder, ask, entered, hosted, made, now, run_of
from sync_api import core

from distributed_state import (
    Agent,
    AsyncAgent,
    ColdUnavailable,
    CommandArgument,
    CommandFailed,
    ConfigurationError,
    Deleted,
    Event,
    InvalidValue,
    Limits,
    Locked,
    NotFound,
    WarmUnavailable,
)
from distributed_state.events import audit

# Conversations


async def test_a_new_conversation_has_its_defaults_when_the_hook_runs(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        assert agent.conversation is None
        await store.session("c").set("title", "first")
        await until(lambda: agent.saw)
        assert agent.saw == [("new", "c", False, [])]
        assert agent.conversation_id == "c"
        assert await now(agent.conversation.get("theme")) == "light"
    assert await store.session("c").get_all() == {"title": "first", "notes": [], "theme": "light"}
    assert [change.actor for change in await store.session("c").history()] == ["", "agent:Recorder"]


@pytest.mark.replicas
async def test_many_replicas_put_the_defaults_in_once(opener: Any) -> None:
    stores = [await opener() for _ in range(3)]
    many = [made(Recorder, store) for store in stores]
    async with hosted(many[0]), hosted(many[1]), hosted(many[2]):
        for number in range(5):
            await stores[0].session(f"c{number}").set("title", number)
        for agent in many:
            await until(lambda agent=agent: len(agent.saw) == 5)
    for number in range(5):
        kinds = [change.kind for change in await stores[1].session(f"c{number}").history()]
        assert kinds == ["set", "initialize"]
    assert all(sorted(agent.saw) == sorted(many[0].saw) for agent in many)
    assert all(seen[3] == [] for agent in many for seen in agent.saw), "before any hook"


async def test_a_cleared_conversation_is_fresh_when_the_hook_runs(store: Any) -> None:
    agent, session = made(Recorder, store), store.session("c")
    async with hosted(agent):
        await session.set("title", "first")
        await until(lambda: agent.saw)
        for round in range(10):
            await session.append_to("notes", f"note {round}")
            await session.clear()
            await until(lambda round=round: len(agent.saw) == round + 2)
            assert agent.saw[-1] == ("new", "c", True, []), "never what was there before"
    assert await session.get_all() == {"notes": [], "theme": "light"}


async def test_a_switch_to_an_unknown_conversation_finds_defaults(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        await store.session("old").append({"role": "user", "content": "hi"})
        await store.session("new").switch(previous_id="old")
        await until(lambda: agent.of("switched"))
        await store.session("old").switch()
        await until(lambda: len(agent.of("switched")) == 2)
        assert agent.of("switched") == [("switched", "new", "old", 0, []), ("switched", "old", "", 1, [])]
        assert agent.conversation_id == "old"
        assert [seen[1] for seen in agent.of("new")] == ["old", "new"]


async def test_the_replica_that_deletes_hears_of_it_before_the_data_goes(store: Any) -> None:
    agent, session = made(Recorder, store), store.session("c")
    async with hosted(agent):
        await session.set("notes", ["kept"])
        session.ephemeral["cache"] = 1
        await until(lambda: agent.of("new"))
        await store.delete("c")
        assert agent.of("deleted") == [("deleted", "c", True, ["kept"])], "before delete() returned"
        assert not await session.exists(fresh=True)
        await store.emit("done")
        await until(lambda: agent.of("event"))
        assert len(agent.of("deleted")) == 1, "and once"
        assert session.ephemeral == {}
        assert agent.conversation is None
        assert agent.conversation_id == ""
        with pytest.raises(NotFound):
            await store.delete("never")


async def test_the_hooks_run_again_for_a_conversation_that_expired_and_began_again(opener: Any) -> None:
    # Long enough for the hook, which must find the conversation that began again.
    store = await opener(session_idle=1.0, sweep=0.02, expired="begin again")
    agent, session = made(Recorder, store), store.session("c")
    async with hosted(agent):
        await session.set("notes", ["kept"])
        await until(lambda: agent.of("deleted"))
        assert agent.of("deleted") == [("deleted", "c", False, ["kept"])]
        await session.set("title", "again")
        await until(lambda: len(agent.of("new")) == 2)
        assert agent.of("new")[1] == ("new", "c", False, [])


async def test_a_late_event_does_not_begin_an_expired_conversation_again(opener: Any) -> None:
    """Else a replica that lags by more than the idle time would begin it again for ever."""
    store = await opener(session_idle=0.2, sweep=0.02, expired="begin again")
    agent, session = made(Recorder, store, since="oldest"), store.session("c")
    await session.set("a", 1)
    await until(lambda: gone(session))
    async with hosted(agent):
        await until(lambda: agent.of("deleted"))
    assert [change.kind for change in await session.history()] == ["set", "expire"]


async def gone(session: Any) -> bool:
    return not await session.exists(fresh=True)


@pytest.mark.only(api="asyncio")
async def test_a_thread_or_another_loop_waits_for_the_hook_as_well(store: Any) -> None:
    """Whoever holds up the loop in which the hooks run cannot, and there they run after it."""
    agent = made(Recorder, store)

    async def elsewhere() -> list[Any]:
        await store.delete("loop")
        return agent.of("deleted")

    def in_thread() -> list[Any]:
        store.blocking.delete("thread")
        return agent.of("deleted")

    async with hosted(agent):
        for id in ("loop", "thread", "held up"):
            await store.session(id).set("notes", ["kept"])
        seen = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        assert seen == [("deleted", "loop", True, ["kept"])]
        seen = await asyncio.to_thread(in_thread)
        assert seen[1:] == [("deleted", "thread", True, ["kept"])]
        store.blocking.delete("held up")
        assert len(agent.of("deleted")) == 2
        await until(lambda: agent.of("deleted")[2:] == [("deleted", "held up", False, ["kept"])])


async def test_without_being_told_first_the_hook_comes_after_the_data_is_gone(store: Any) -> None:
    """The negative control of the test above."""
    agent = made(Recorder, store)
    async with hosted(agent):
        core(store)._lifecycle.context.deleting.clear()
        await store.session("c").set("notes", ["kept"])
        await store.delete("c")
        await until(lambda: agent.of("deleted"))
        assert agent.of("deleted") == [("deleted", "c", False, ["kept"])]


class LastWords(Recorder):
    """Looks at the last state in every way, and tries to change it."""

    async def on_conversation_deleted(self, conversation_id: str) -> None:
        it: Any = self
        last = it.conversation
        with pytest.raises(Deleted):
            await now(last.set("a", 1))
        with pytest.raises(Deleted):
            await now(last.append({"role": "user", "content": "too late"}))
        with pytest.raises(AttributeError):
            last.no_such_thing
        found = {
            "id": last.id,
            "all": await now(last.get_all()),
            "has": await now(last.has("notes")),
            "messages": [each.content for each in await now(last.messages(last=1))],
            "phase": await now(last.phase()),
            "version": await now(last.version()),
            "none": await now(last.get("none", 7)),
        }
        self.saw.append(("deleted", found))


@pytest.mark.replicas
async def test_other_replicas_hear_after_it_with_the_last_state_readable(opener: Any) -> None:
    here, there = await opener(), await opener()
    agent = made(LastWords, there)
    async with hosted(agent):
        await here.session("c").write(
            set={"notes": ["kept"]}, append=[{"role": "user", "content": text} for text in ("one", "two")], phase="busy"
        )
        await until(lambda: agent.of("new"))
        there.session("c").ephemeral["cache"] = 1
        version = await here.session("c").version(fresh=True)
        await here.delete("c")
        await until(lambda: agent.of("deleted"))
        await until(lambda: "cache" not in there.session("c").ephemeral)
        assert agent.of("deleted")[0][1] == {
            "id": "c",
            "all": {"notes": ["kept"], "theme": "light"},
            "has": True,
            "messages": ["two"],
            "phase": "busy",
            "version": version,
            "none": 7,
        }
        assert "session:c" not in tiers(there).hot.entries
        assert agent.agent_context.errors == 0


class Deleter(Recorder):
    """Deletes another conversation when one is created."""

    async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        it: Any = self
        await super().on_new_conversation(conversation_id, is_clear)
        if conversation_id == "second":
            await now(it.store.delete("first"))
            self.saw.append(("returned",))


async def test_a_hook_may_delete_a_conversation(store: Any) -> None:
    agent = made(Deleter, store)
    async with hosted(agent):
        await store.session("first").set("a", 1)
        await store.session("second").set("a", 1)
        await until(lambda: agent.of("returned"))
        assert [seen[0] for seen in agent.saw] == ["new", "new", "deleted", "returned"]


async def test_a_conversation_that_is_deleted_anew_is_told_anew(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        for round in range(1, 4):
            await store.session("c").create({"round": round})
            await until(lambda round=round: len(agent.of("new")) == round)
            await store.delete("c")
            assert len(agent.of("deleted")) == round


# Agents, folders, other events


async def test_deactivated_comes_before_activated(store: Any) -> None:
    first, second = made(Recorder, store, name="first"), made(Recorder, store, name="second")
    shared: list[tuple[Any, ...]] = []
    first.saw = second.saw = shared
    async with hosted(first, second):
        switches = [("", "first", "c"), ("first", "second", "c"), ("second", None, "")]
        for before, after, id in switches:
            data = {"previous_agent": before, "next_agent": after, "conversation_id": id, "client": ""}
            await store.emit("agent.switched", data, subject="client:")
        await until(lambda: len(shared) == 4)
        assert shared == [
            ("activated", "", "c"),
            ("deactivated", "second"),
            ("activated", "first", "c"),
            ("deactivated", None),
        ]
        assert (first.active, second.active) == (False, False)
        assert first.conversation_id == "c", "an event without a conversation changes nothing there"


async def test_the_agent_that_a_client_had_is_deactivated_without_being_named(store: Any) -> None:
    first, second = made(Recorder, store, name="first"), made(Recorder, store, name="second")
    shared: list[tuple[Any, ...]] = []
    first.saw = second.saw = shared
    async with hosted(first, second):
        told = [
            await store.activate_agent("first", client="web", conversation_id="c"),
            await store.activate_agent("first", client="phone"),
            await store.activate_agent("second", client="web"),
            await ask(first, "activate", client="web"),
            await store.activate_agent(None, client="web"),
        ]
        await until(lambda: len(shared) == 7)
        assert shared == [
            ("activated", "", "c"),
            ("activated", "", ""),
            ("deactivated", "second"),
            ("activated", "first", ""),
            ("deactivated", "first"),
            ("activated", "second", ""),
            ("deactivated", None),
        ]
        assert (first.active, second.active) == (True, False), "for the phone"
    assert [(each.type, each.subject, each.actor) for each in told[2:4]] == [
        ("agent.switched", "client:web", ""), ("agent.switched", "client:web", "agent:first"),
    ]  # fmt: skip
    assert [each.data["previous_agent"] for each in told] == ["", "", "first", "second", "first"]
    with pytest.raises(InvalidValue, match="client is a str"):
        await store.activate_agent("first", client=7)
    assert (await store.activate_agent("x", client="web", previous_agent="")).data["previous_agent"] == ""


async def test_a_switch_that_names_no_agent_before_deactivates_the_one_that_the_client_had(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As told by `emit`, or while SQL, which knows the last one, is away."""
    first, second = made(Recorder, store, name="first"), made(Recorder, store, name="second")

    async def away(*_: Any) -> Any:
        raise ColdUnavailable("no SQL")

    monkeypatch.setattr(audit, "audit", away)
    async with hosted(first, second):
        await store.emit("agent.switched", {"next_agent": "first", "client": "web"})
        await store.activate_agent("second", client="web")
        await until(lambda: second.saw)
        assert first.saw == [("activated", None, ""), ("deactivated", "second")]
        assert second.saw == [("activated", "first", "")]


async def test_an_agent_of_a_client_follows_that_client(store: Any) -> None:
    mine, all_of_them = made(Recorder, store, name="mine", client="web"), made(Recorder, store, name="all")
    async with hosted(mine, all_of_them):
        await store.session("a").switch(client="web")
        await store.session("b").switch(client="phone")
        await store.session("c").switch()
        await until(lambda: len(all_of_them.of("switched")) == 3)
        assert [seen[1] for seen in mine.of("switched")] == ["a"]
        assert (mine.conversation_id, all_of_them.conversation_id) == ("a", "c")
        assert len(mine.of("new")) == 3, "that a conversation was created is no client's alone"
        for client in ("web", "phone"):
            data = {"previous_agent": "", "next_agent": "all", "conversation_id": "a", "client": client}
            await store.emit("agent.switched", data)
        data = {"previous_agent": "all", "next_agent": None, "conversation_id": "a", "client": "web"}
        await store.emit("agent.switched", data)
        await until(lambda: all_of_them.of("deactivated"))
        assert all_of_them.active, "for the phone"


class Resting(Recorder):
    """Does not work in the background while nobody talks to it."""

    pause_when_inactive = True


async def test_background_work_rests_while_the_agent_is_inactive(store: Any) -> None:
    agent = made(Resting, store)
    async with hosted(agent):
        assert not agent.paused
        for before, after in (("Resting", "other"), ("other", "Resting")):
            await store.emit("agent.switched", {"previous_agent": before, "next_agent": after})
            await until(lambda after=after: agent.paused == (after == "other"))


async def test_folders_reach_the_hook_and_the_getter(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        assert agent.get_invocation_directory() == ""
        await store.emit("directory.changed", {"old_path": "/a", "new_path": "/b"}, subject="client:")
        await until(lambda: agent.saw)
        assert agent.saw == [("directory", "/a", "/b")]
        assert agent.get_invocation_directory() == "/b"
        told = [
            await store.change_directory("/c"),
            await ask(agent, "change_directory", "/d"),
            await store.change_directory("/e", client="web"),
            await store.change_directory("/f", client="web", old_path="/x"),
        ]
        assert [each.data["old_path"] for each in told] == ["/b", "/c", "", "/x"]
        assert told[3].subject == "client:web"
        await until(lambda: len(agent.saw) == 5)
        assert agent.saw[1:3] == [("directory", "/b", "/c"), ("directory", "/c", "/d")]
        with pytest.raises(InvalidValue, match="new_path is a str"):
            await store.change_directory(None)


async def test_unknown_and_malformed_events_are_not_fatal(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        await store.emit("mail.sent", {"to": "you"})
        await store.emit("conversation.created", subject="no session")
        await store.emit("agent.switched", {"previous_agent": 7, "next_agent": ["x"], "client": {}})
        await store.emit("directory.changed", {})
        await store.emit("config.changed", {"config": {"a": 1}}, subject="somebody's")
        await store.emit("conversation.switched", {"message_count": "many", "previous_id": None}, subject="session:x")
        await store.emit("last")
        await until(lambda: ("event", "last") in agent.saw)
        assert [seen[1] for seen in agent.of("event")] == [
            "mail.sent",
            "conversation.created",
            "config.changed",
            "last",
        ]
        assert agent.of("switched") == [("switched", "x", "", 0, [])]
        assert agent.of("directory") == [("directory", "", "")]
        assert agent.agent_context.errors == 0


class Poisoned(Recorder):
    """One conversation breaks it, one holds it up."""

    slow_hook = 0.05

    async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        if conversation_id == "poison":
            raise LookupError("no such thing")
        if conversation_id == "slow":
            await asyncio.sleep(0.06)
        await super().on_new_conversation(conversation_id, is_clear)


async def test_a_hook_that_fails_or_is_slow_is_logged_with_its_event(store: Any, caplog: Any) -> None:
    agent = made(Poisoned, store)
    other = made(Recorder, store, name="other")
    async with hosted(agent, other):
        for id in ("poison", "slow", "good"):
            await store.session(id).set("a", 1)
        await until(lambda: len(other.of("new")) == 3)
        assert [seen[1] for seen in agent.of("new")] == ["slow", "good"]
        assert (agent.agent_context.errors, other.agent_context.errors) == (1, 0)
    failed, slow = ([r for r in caplog.records if word in r.getMessage()] for word in ("hook failed", "slow hook"))
    assert [(r.levelname, r.agent, r.fields["subject"]) for r in failed] == [("ERROR", "Poisoned", "session:poison")]
    assert "LookupError: no such thing" in failed[0].fields["error"]
    found = [(r.levelname, r.fields["subject"], r.fields["event"]) for r in slow]
    assert ("WARNING", "session:slow", "conversation.created") in found  # a busy machine may delay others, too


async def test_hooks_get_the_parameters_that_they_name(store: Any) -> None:
    saw: list[Any] = []

    class Some:
        def on_new_conversation(self, is_clear: bool) -> None:
            saw.append(is_clear)

        def on_conversation_switched(self, conversation: str, *, message_count: int) -> None:
            saw.append((conversation, message_count))

        async def on_config_update(self, values: Any) -> None:
            saw.append(values)

    agent = made(Some, store, config={"a": 1})
    async with hosted(agent):
        await store.session("c").switch()
        await store.admin.reload_config({"a": 2})
        await until(lambda: len(saw) == 3)
    assert saw == [False, ("c", 0), {"a": 2}]


async def test_a_hook_that_wants_more_is_refused_at_the_start(store: Any) -> None:
    class Greedy:
        def on_agent_deactivated(self, next_agent: str, reason: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Greedy\.on_agent_deactivated is given next_agent"):
        async with hosted(made(Greedy, store)):
            pass
    async with hosted(made(Recorder, store)):
        """The store is as before."""


@pytest.mark.only(api="asyncio")
async def test_a_plain_hook_of_an_asyncio_agent_does_not_hold_up_the_loop(store: Any) -> None:
    threads: list[Any] = []

    class Plain(AsyncAgent):
        def on_new_conversation(self, conversation_id: str) -> None:
            threads.append((threading.current_thread(), self.conversation_id))
            self.register_section("s", "S")

    agent = Plain(store)
    async with agent:
        await store.session("c").set("a", 1)
        await until(lambda: "s" in agent.visible["sections"])
    assert threads[0][0] is not threading.current_thread()
    assert threads[0][1] == "c", "the context goes along"


@pytest.mark.only(api="blocking")
async def test_coroutine_hooks_of_a_blocking_agent_share_one_loop_of_its_own(store: Any) -> None:
    loops: list[Any] = []

    class Mixed:
        async def initialize(self) -> None:
            loops.append(asyncio.get_running_loop())

        async def on_new_conversation(self, conversation_id: str) -> None:
            await asyncio.sleep(0)
            loops.append(asyncio.get_running_loop())
            self.conversation.set("seen", True)  # type: ignore[attr-defined]

    async with hosted(made(Mixed, store)):
        await store.session("c").set("a", 1)
        await until(lambda: len(loops) == 2)
    assert loops[0] is loops[1] is not asyncio.get_running_loop()
    assert loops[0].is_closed()
    assert await store.session("c").get("seen") is True


# State that cannot be read


async def test_a_field_that_cannot_be_read_gives_the_default_and_is_kept(store: Any, caplog: Any) -> None:
    agent, session = made(Recorder, store), store.session("c")
    async with hosted(agent):
        await session.set("notes", ["a"])
        await until(lambda: agent.of("new"))
        with redis_of(store) as client:
            client.hset(keys_of(store, "c").record, "notes", b'["a')
        store.invalidate()
        assert await now(agent.conversation.get("notes")) == []
        assert await now(agent.conversation.get("notes", "mine")) == "mine"
        assert await now(agent.conversation.get_all()) == {"notes": [], "theme": "light"}
        with redis_of(store) as client:
            assert client.hget(keys_of(store, "c").record, "notes") == b'["a'
        await session.clear()
        await until(lambda: len(agent.of("new")) == 2)
        assert agent.of("new")[1] == ("new", "c", True, [])
    warned = [r for r in caplog.records if "cannot be read" in r.getMessage()]
    assert {(r.levelname, r.fields["record"], r.fields["field"]) for r in warned} == {("WARNING", "session:c", "notes")}
    assert all('["a' not in r.getMessage() for r in warned), "a value may be a secret"


async def test_persistent_state_is_the_fleets_and_ephemeral_the_process(store: Any) -> None:
    class Counting:
        persistent_defaults = {"runs": 0}  # noqa: RUF012 - as a user writes it

        async def initialize(self) -> None:
            it: Any = self
            await now(it.persistent.increment("runs"))
            it.ephemeral["cache"] = 1

    for round in (1, 2):
        agent = made(Counting, store)
        async with hosted(agent):
            assert await now(agent.persistent.get("runs")) == round
            assert agent.ephemeral == {"cache": 1}
    assert await store.app("agent:Counting").get("runs") == 2


@pytest.mark.replicas
async def test_defaults_may_be_a_function_whose_result_is_the_fleets(opener: Any) -> None:
    calls: list[str] = []

    class Made(Recorder):
        async def conversation_defaults(self, id: str) -> dict[str, Any]:  # type: ignore[override]
            calls.append(id)
            return {"notes": [id, len(calls)]}

    here, there = await opener(), await opener()
    first, second = made(Made, here), made(Made, there)
    async with hosted(first), hosted(second):
        await here.session("c").set("a", 1)
        await until(lambda: first.saw and second.saw)
        assert first.saw == second.saw, "if both called it, the result of one counts"
        await there.session("c").switch()
        await until(lambda: first.of("switched") and second.of("switched"))
    assert set(calls) == {"c"}
    assert len(calls) <= 2, "not called any more"


@pytest.mark.only(warm="fake", cold="memory")
@pytest.mark.parametrize("name", ["conversation_defaults", "persistent_defaults"])
@pytest.mark.parametrize("value", [time.time, object()])
async def test_defaults_that_cannot_be_stored_are_refused_at_the_start(store: Any, name: str, value: Any) -> None:
    agent = made(Recorder, store)
    setattr(agent, name, {"notes": [], "created": value})
    with pytest.raises(ConfigurationError, match=rf"Recorder\.{name}: created: .* JSON value.*a function that returns"):
        async with hosted(agent):
            pass


# Commands


class Noting(Recorder):
    """Takes notes on command."""

    def initialize(self) -> None:
        it: Any = self
        it.register_command(
            "add",
            self.add,
            description="Add a note",
            arguments=[
                CommandArgument("note", "string", "Text", required=True),
                CommandArgument("times", "integer", default=1),
            ],
        )
        it.register_command("list", self.list)
        it.register_command("whole", self.whole, arguments=[CommandArgument("x", "number")])
        it.register_command("fail", self.fail)

    async def add(self, note: str, times: int, progress: Any) -> dict[str, Any]:
        it: Any = self
        for number in range(times):
            progress(f"note {number + 1}", of=times)
            await now(it.conversation.append_to("notes", note))
        return {"total": len(await now(it.conversation.get("notes")))}

    async def list(self) -> Any:
        it: Any = self
        return [] if it.conversation is None else await self.field("notes")

    async def whole(self, everything: dict[str, Any]) -> Any:
        return everything

    async def fail(self) -> None:
        raise LookupError("nothing there")


async def test_commands_run_on_the_conversation_with_checked_arguments(store: Any) -> None:
    agent, reports = made(Noting, store), list[Any]()
    async with hosted(agent):
        assert await ask(agent, "run_command", "list") == []
        await store.session("a").switch()
        await until(lambda: agent.conversation_id == "a" and agent.of("switched"))

        def report(text: str, fields: dict[str, Any]) -> None:
            reports.append((text, fields))

        assert await ask(agent, "run_command", "add", {"note": "x", "times": 2}, progress=report) == {"total": 2}
        assert reports == [("note 1", {"of": 2}), ("note 2", {"of": 2})]
        assert await ask(agent, "run_command", "add", {"note": "y"}, conversation_id="b") == {"total": 1}
        assert await ask(agent, "run_command", "list", conversation_id="a") == ["x", "x"]
        assert await ask(agent, "run_command", "whole", {"x": 1.5}) == {"x": 1.5}
        assert await ask(agent, "run_command", "whole") == {}, "what is not given is not there"
        assert agent.visible["commands"][0]["arguments"][0] == {
            "name": "note", "type": "string", "description": "Text", "required": True, "default": None,
        }  # fmt: skip
        for args, words in (
            ({}, "'note' is missing"),
            ({"note": 7}, "'note' is of type string, not int"),
            ({"note": "x", "times": True}, "'times' is of type integer, not bool"),
            ({"note": "x", "colour": 1}, "takes no argument 'colour'"),
            ("note", "an object, not a str"),
        ):
            with pytest.raises(InvalidValue, match=words):
                await ask(agent, "run_command", "add", args)
        with pytest.raises(InvalidValue, match="list: takes no argument 'n'; it was registered without `arguments=`"):
            await ask(agent, "run_command", "list", {"n": 1})
        with pytest.raises(NotFound, match="there are add, list"):
            await ask(agent, "run_command", "remove")
        with pytest.raises(CommandFailed, match="LookupError: nothing there") as caught:
            await ask(agent, "run_command", "fail")
        assert isinstance(caught.value.__cause__, LookupError)
        assert agent.agent_context.errors == 1
    assert await store.session("a").get("notes") == ["x", "x"]


async def test_an_argument_that_is_not_given_leaves_the_parameters_own_default(store: Any) -> None:
    class Some(Recorder):
        async def initialize(self) -> None:
            it: Any = self
            described = [CommandArgument("limit", "integer"), {"name": "tags", "type": "array", "default": []}]
            it.register_command("some", self.some, arguments=described)

        async def some(self, args: dict[str, Any], tags: list[str], limit: int | None = 10) -> list[Any]:
            tags.append("seen")
            return [args.get("limit", 5), limit, tags]

    agent = made(Some, store)
    async with hosted(agent):
        for _ in range(2):
            assert await ask(agent, "run_command", "some") == [5, 10, ["seen"]], "each call has a default of its own"
        assert await ask(agent, "run_command", "some", {"limit": 3, "tags": ["a"]}) == [3, 3, ["a", "seen"]]


@pytest.mark.unit
def test_arguments_are_checked_down_to_their_items_and_properties() -> None:
    user = {"type": "object", "properties": {"name": {"required": True}, "age": {"type": "integer"}}}
    users = CommandArgument("users", "array", items=user)
    users.check([{"name": "Ann", "age": 7}, {"name": "Bo", "more": 1}])
    size = CommandArgument("size", enum=["S", "M"], default="M")
    assert size.check("S") == "S"
    for argument, value, words in (
        (users, [{"name": "Ann"}, 7], "'users', item 1 is of type object, not int"),
        (users, [{"age": 7}], "'users', item 0, property 'name' is missing"),
        (users, [{"name": "Ann", "age": "7"}], "property 'age' is of type integer, not str"),
        (size, "XL", "'size' is one of 'S', 'M', not 'XL'"),
    ):
        with pytest.raises(InvalidValue, match=words):
            argument.check(value)


async def test_commands_that_make_no_sense_are_refused_when_they_are_registered(store: Any) -> None:
    agent = made(Recorder, store)
    for command in (
        lambda: agent.register_command("", print),
        lambda: agent.register_command("x", "no function"),
        lambda: agent.register_command("x", lambda a, b, c: None),
        lambda: agent.register_command("x", print, arguments=[CommandArgument("a"), CommandArgument("a")]),
        lambda: CommandArgument("a", "text"),
        lambda: CommandArgument(""),
        lambda: CommandArgument("a", "integer", default="1"),
        lambda: CommandArgument("a", "array", items={"type": "text"}),
        lambda: CommandArgument("a", "object", properties={"x": "text"}),
        lambda: CommandArgument("a", enum="abc"),
        lambda: CommandArgument("a", enum=["x"], default="y"),
        lambda: agent.register_command("x", print, expose_as="menu"),
    ):
        with pytest.raises(InvalidValue):
            command()
    assert agent.visible["commands"] == []


# What it shows


async def test_what_an_agent_shows_is_kept_as_plain_values(store: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    agent, told = made(Recorder, store), list[Any]()
    agent.listeners.append(lambda kind, content: told.append((kind, content)))
    agent.set_description("Takes notes")
    agent.set_system_prompt("You take notes.")
    agent.register_section("status", "Status", "starting", collapsed=True)
    agent.update_section("status", "ready")
    agent.register_section("other", "Other")
    assert agent.unregister_section("other")
    agent.log("info", "ready", count=3)
    assert agent.visible["sections"] == {"status": {"title": "Status", "content": "ready", "collapsed": True}}
    assert (agent.visible["description"], agent.visible["system_prompt"]) == ("Takes notes", "You take notes.")
    assert [kind for kind, _ in told] == [
        "description", "system_prompt", "section", "section", "section", "section_removed", "log",
    ]  # fmt: skip
    record = caplog.records[-1]
    assert (record.getMessage(), record.agent, record.fields) == ("ready count=3", "Recorder", {"count": 3})
    assert agent.unregister_section("status")
    assert not agent.unregister_section("status"), "it is gone"
    agent.update_section("new", "x")
    assert agent.visible["sections"] == {"new": {"title": "new", "content": "x", "collapsed": False}}
    for wrong in (
        lambda: agent.log("loud", "x"),
        lambda: agent.set_system_prompt(7),
        lambda: agent.register_section("s", "t", 7),
    ):
        with pytest.raises(InvalidValue):
            wrong()
    agent.listeners.append(lambda kind, content: 1 / 0)
    agent.set_description("still works")
    assert agent.visible["description"] == "still works"


async def test_figures_are_logged_with_a_warning_beyond_their_limits(store: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    asked: list[Any] = []

    class Asked(Poisoned):
        limits = Limits(memory_mb=0.001)

        def on_status(self, status: Any) -> None:
            asked.append(status)

    agent = made(Asked, store)
    async with hosted(agent):
        for id in ("a", "b", "poison"):
            await store.session(id).set("x", 1)
        await until(lambda: agent.agent_context.errors)
        agent.queue_size = 1001
        status = await ask(agent, "status")
        assert (status.requests, status.errors, status.error_rate, status.conversations) == (3, 1, 33.33, 3)
        assert status.queue_size == 1001
        assert status.uptime > 0
        assert status.memory_mb > 1
        assert 0 <= status.lag < 5
        assert status.tiers["link_up"] in (0, 1)
        assert asked == [status]
    warned = [r.fields for r in caplog.records if "limit" in getattr(r, "fields", {})]
    assert [next(iter(each)) for each in warned] == ["error_rate", "queue_size", "memory_mb"]
    assert [r for r in caplog.records if r.getMessage().startswith("status ") and r.fields["requests"] == 3]


# Background work


async def test_run_ends_with_main_loop_and_waits_while_paused(store: Any) -> None:
    class Working(Recorder):
        rounds = 0

        async def start(self) -> None:
            it: Any = self
            it.pause()
            self.saw.append(("start",))

        async def main_loop(self) -> None:
            it: Any = self
            while await now(it.wait(0.01)):
                self.rounds += 1
                if self.rounds == 3:
                    return

        async def on_shutdown(self) -> None:
            self.saw.append(("shutdown",))

        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    agent = made(Working, store)
    running = asyncio.create_task(ask(agent, "run"))
    await until(lambda: agent.saw)
    await asyncio.sleep(0.1)
    assert agent.rounds == 0, "it rests"
    agent.resume()
    await running
    assert agent.rounds == 3
    assert agent.saw == [("start",), ("shutdown",), ("cleanup",)]
    assert await store.session("still").set("open", 1) == 1


class Background(Recorder):
    """Works in the background, and says when it ended."""

    rounds, fails = 0, False

    async def main_loop(self) -> None:
        it: Any = self
        while await now(it.wait(0.001)):
            self.rounds += 1
            if self.fails:
                raise LookupError("no more work")
        self.saw.append(("main_loop ends", it.stopping))

    async def cleanup(self) -> None:
        self.saw.append(("cleanup",))


@pytest.mark.parametrize("way", [entered, hosted])
async def test_main_loop_runs_inside_a_with_and_ends_with_it(store: Any, way: Any) -> None:
    agent = made(Background, store)
    for run in range(2):
        agent.saw.clear()
        async with way(agent):
            rounds = agent.rounds
            await until(lambda rounds=rounds: agent.rounds > rounds + 2)
            await store.session(f"c{run}").create()
            await until(lambda: agent.of("new"))
        assert agent.saw[-2:] == [("main_loop ends", True), ("cleanup",)]
        assert agent.agent_context.host is None


async def test_what_main_loop_raises_does_not_end_the_body_of_a_with_but_comes_out_of_it(
    store: Any, caplog: Any
) -> None:
    agent = made(Background, store)
    agent.fails = True
    with pytest.raises(LookupError, match="no more work"):
        async with entered(agent):
            await until(lambda: [r for r in caplog.records if r.getMessage().startswith("main_loop failed")])
            assert not agent.stopping
            await store.session("c").create()
            await until(lambda: agent.of("new"))
    assert agent.saw[-1] == ("cleanup",)
    with pytest.raises(ZeroDivisionError):  # that of the body says more
        async with entered(agent):
            await until(lambda: agent.agent_context.errors == 2)
            raise ZeroDivisionError
    agent.fails = False
    async with entered(agent):
        """A failure of an earlier run is over."""


async def test_an_agent_stopped_by_its_start_begins_no_main_loop(store: Any) -> None:
    class Stopped(Background):
        async def start(self) -> None:
            it: Any = self
            it.stop()

    agent = made(Stopped, store)
    async with entered(agent):
        assert agent.stopping
    assert agent.saw == [("cleanup",)]


async def test_what_main_loop_raises_comes_out_of_run_after_the_end(store: Any) -> None:
    class Failing(Recorder):
        async def main_loop(self) -> None:
            raise LookupError("no more work")

        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    agent = made(Failing, store)
    with pytest.raises(LookupError, match="no more work"):
        await ask(agent, "run")
    assert agent.saw == [("cleanup",)]


async def test_stop_ends_a_run_from_anywhere(store: Any) -> None:
    agent = made(Recorder, store)
    running = asyncio.create_task(ask(agent, "run"))
    await store.emit("hello")
    await until(lambda: run_of(agent) and run_of(agent).events is not None)
    threading.Thread(target=agent.stop).start()
    await asyncio.wait_for(running, 10)
    with pytest.raises(ConfigurationError, match="is not running"):
        await ask(agent, "status")


async def test_an_initialize_that_fails_is_raised_and_leaves_nothing_running(store: Any) -> None:
    class Failing(Recorder):
        async def initialize(self) -> None:
            raise LookupError("no model")

        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    agent = made(Failing, store)
    with pytest.raises(LookupError):
        async with hosted(agent):
            pass
    assert agent.saw == [("cleanup",)]
    assert core(store)._lifecycle.context.deleting == []
    assert agent.agent_context.host is None


async def test_an_agent_runs_once_at_a_time_and_names_are_unique(store: Any, opener: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        with pytest.raises(ConfigurationError, match="is running already"):
            async with hosted(agent):
                pass
        await store.session("c").set("a", 1)
        await until(lambda: agent.saw)
    with pytest.raises(InvalidValue, match="a name each"):
        async with hosted(made(Recorder, store), made(Recorder, store)):
            pass
    with pytest.raises(InvalidValue):
        made(Recorder, store, name=7)


async def test_an_agent_that_opens_its_store_closes_it(opener: Any) -> None:
    from distributed_state import AsyncStateStore, StateStore

    opened: list[Any] = []

    def open_it() -> Any:
        kind = AsyncStateStore if opener.api == "asyncio" else StateStore
        opened.append(kind.open(opener.url, archive=opener.archive, namespace=opener.namespace))
        return opened[-1]

    kind = type("Owner", (Recorder, AsyncAgent), {}) if opener.api == "asyncio" else None
    if kind is None:
        from distributed_state import Agent

        kind = type("Owner", (Recorder, Agent), {})
    agent = kind(open_it)
    with pytest.raises(ConfigurationError, match="opens its store only when it runs"):
        agent.store
    async with hosted(agent):
        await now(agent.store.session("c").set("a", 1)) if opener.api == "asyncio" else agent.store.session("c").set(
            "a", 1
        )
        await until(lambda: agent.saw)
    with pytest.raises(ConfigurationError, match="it is closed"):
        (opened[0] if opener.api == "asyncio" else opened[0]._core)._lifecycle.tiers()


@pytest.mark.parametrize("base", [Agent, AsyncAgent])
async def test_an_agent_without_a_store_opens_one_as_the_environment_says(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBUTED_STATE_ARCHIVE", f"sqlite:///{tmp_path}/notes.db")
    monkeypatch.setenv("DISTRIBUTED_STATE_NAMESPACE", "notes")

    class NoteAgent(Recorder, base):  # type: ignore[misc]  # each API in turn
        def __init__(self) -> None:
            super().__init__(name="note_agent")

        async def main_loop(self) -> None:
            await now(self.store.session("c").set("note", "milk"))
            await now(self.wait(0.0))

    for agent in NoteAgent(), NoteAgent():
        await ask(agent, "run")
        with pytest.raises(ConfigurationError, match="is not running"):
            agent.store
    async with entered(NoteAgent()) as agent:
        assert core(agent.store).settings.namespace == "notes"
        assert await now(agent.store.session("c").get("note")) == "milk"
    first, second = made_without_a_store(base, "first"), made_without_a_store(base, "second")
    async with hosted(first, second):
        assert first.store is second.store


def made_without_a_store(base: Any, name: str) -> Any:
    return type(name, (Recorder, base), {})(name=name)


@pytest.mark.wide
@pytest.mark.only(warm="real")
async def test_a_replica_that_missed_events_looks_anew(store: Any) -> None:
    class Missing(Recorder):
        async def on_resync(self, event: Any) -> None:
            self.saw.append(("resync", event.type))

    agent = made(Missing, store, config={"a": 1})
    async with hosted(agent):
        await store.session("c").set("a", 1)
        await until(lambda: agent.conversation_id == "c")
        with redis_of(store) as client:
            client.delete(*client.scan_iter(match=f"{core(store).settings.namespace}*", count=1000))
        await store.session("d").set("a", 1)
        await until(lambda: agent.of("resync"), 30)


async def test_each_of_several_agents_puts_its_own_defaults_in(store: Any) -> None:
    class Other(Recorder):
        conversation_defaults = {"theme": "dark", "mood": "good"}  # noqa: RUF012 - as a user writes it

    first, second = made(Recorder, store, name="a b"), made(Other, store, name="a")
    async with hosted(first, second):
        await store.session("c").initialize({"title": "mine"})
        await until(lambda: second.saw)
        session = store.session("c")
        assert await session.get_all() == {"title": "mine", "notes": [], "theme": "light", "mood": "good"}
        await session.delete("mood")
        await session.switch()
        await until(lambda: second.of("switched"))
        assert not await session.has("mood"), "what was deleted since is not put back"
        await session.clear()
        await until(lambda: len(second.of("new")) == 2)
        assert await session.get_all() == {"notes": [], "theme": "light", "mood": "good"}
    assert [change.kind for change in await session.history()].count("initialize") == 5


@pytest.mark.wide
async def test_a_hook_that_hangs_is_noticed_and_does_not_hinder_the_end(store: Any, caplog: Any) -> None:
    release = threading.Event()

    class Hanging(Recorder):
        stuck_hook = 0.05
        shutdown_timeout = 0.2

        async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
            while not release.is_set():
                await asyncio.sleep(0.01)

        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    agent = made(Hanging, store)
    async with hosted(agent):
        await store.session("c").set("a", 1)
        await until(lambda: [r for r in caplog.records if "has been running for" in r.getMessage()])
        asyncio.get_running_loop().call_later(1.0, release.set)
    assert agent.saw == [("cleanup",)]
    assert [r for r in caplog.records if "Hanging.on_new_conversation did not end" in r.getMessage()]


@pytest.mark.only(api="asyncio")
async def test_a_run_that_is_cancelled_still_cleans_up(store: Any) -> None:
    class Cleaning(Recorder):
        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    agent = made(Cleaning, store)
    running = asyncio.create_task(agent.run())
    await until(lambda: run_of(agent) and run_of(agent).loops.jobs)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert agent.saw == [("cleanup",)]
    assert await store.session("still").set("open", 1) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # the fork is what is tested
@pytest.mark.only(api="blocking", warm="real")
async def test_a_forked_child_deletes_without_the_parents_hooks(opener: Any) -> None:
    store = await opener()
    agent = made(Recorder, store)
    await store.session("c").set("a", 1)
    async with hosted(agent):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                began = time.monotonic()
                store.it.delete("c")
                os._exit(0 if time.monotonic() - began < 9 else 3)
            os._exit(2)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await until(lambda: agent.of("deleted"))
        assert agent.of("deleted")[0][2] is False, "for the parent another replica did it"


@pytest.mark.replicas
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "without the guard"])
async def test_who_hears_of_a_change_finds_it(opener: Any, guarded: bool, monkeypatch: Any) -> None:
    """The event may come before what hot is told of the same commit: here hot is told nothing at all."""
    here, there = await opener(), await opener(max_staleness=60)
    agent = made(Recorder, there)

    async def cleared(id: str) -> Any:
        """What the hook finds."""
        text = f"session:{id}"

        async def hot() -> bool:
            """Also that the agent has made it ready: else it would have to ask the server for that once more."""
            await there.session(id).get("notes")
            entry = tiers(there).hot.entries.get(text)
            return entry is not None and {b"notes", b"#initialized"} <= entry.fields.keys()

        def told() -> list[Any]:
            return [each for each in agent.of("new") if each[1] == id]

        await here.session(id).set("notes", ["old"])
        await until(told)
        await until(hot)
        with deafened(tiers(there)), monkeypatch.context() as patch:
            if not guarded:
                patch.setattr(tiers(there).hot, "expect", lambda text, epoch, version: None)
            await here.session(id).clear()
            await until(lambda: len(told()) > 1)
        return told()[1][2:]

    async with hosted(agent):
        found = [await cleared(f"c{number}") for number in range(4)]
    if guarded:
        assert found == [(True, [])] * 4
    else:
        assert (True, ["old"]) in found, "hot may have been emptied for another reason, but not each time"


@pytest.mark.parametrize("place", ["initialize", "main_loop", "on_event"])
async def test_an_exit_anywhere_ends_the_run_with_its_code(store: Any, place: str) -> None:
    class Leaving(Recorder):
        async def cleanup(self) -> None:
            self.saw.append(("cleanup",))

    async def leave(self: Any, event: Any = None) -> None:
        sys.exit(3)

    setattr(Leaving, place, leave)
    agent = made(Leaving, store)
    running = asyncio.create_task(leaving(agent))
    if place == "on_event":
        await until(lambda: run_of(agent) and run_of(agent).loops.jobs)
        await store.emit("time.to.go")
    assert await running == 3
    assert agent.saw[-1] == ("cleanup",)


async def leaving(agent: Any) -> int:
    """The code that it exits with; an event loop takes SystemExit for its own end, so it must not get there."""
    if isinstance(agent, AsyncAgent):
        try:
            await agent.run()
        except SystemExit as error:
            return int(str(error.code))
    else:

        def run() -> int:
            with pytest.raises(SystemExit) as caught:
                agent.run()
            return int(str(caught.value.code))

        return int(await asyncio.to_thread(run))
    raise AssertionError("it did not exit")


@pytest.mark.replicas
async def test_a_deletion_that_failed_here_does_not_silence_that_of_another_replica(opener: Any) -> None:
    here, there = await opener(), await opener()
    agent = made(Recorder, here)
    async with hosted(agent):
        await here.session("c").set("notes", ["kept"])
        await until(lambda: agent.of("new"))
        async with there.session("c").lock():
            with pytest.raises(Locked):
                await here.delete("c")
        assert len(agent.of("deleted")) == 1
        await there.delete("c")
        await until(lambda: len(agent.of("deleted")) == 2)
        assert agent.of("deleted") == [("deleted", "c", True, ["kept"]), ("deleted", "c", False, ["kept"])]


async def test_what_an_agent_shows_is_listed_with_its_replica(store: Any, caplog: Any) -> None:
    agent = made(Noting, store)

    async def told() -> dict[str, Any]:
        return dict((await store.admin.replicas())[0].status)

    async with hosted(agent):
        agent.register_section("s", "Section", "text")
        await ask(agent, "status")

        async def shown() -> Any:
            found = (await told())["agents"][0]
            return found if found["status"] else None

        found = await until(shown)
        assert (found["name"], found["active"], found["sections"]["s"]["content"]) == ("Noting", False, "text")
        assert found["status"]["errors"] == 0
        agent.set_system_prompt("x" * 20_000)
        await ask(agent, "status")

        async def shortened() -> bool:
            return "system_prompt" not in (await told())["agents"][0]

        await until(shortened)
        assert (await told())["agents"][0]["name"] == "Noting"
        assert [r for r in caplog.records if "leaves out system_prompt" in r.getMessage()]
        await store.session("c").set("a", 1)
        await until(lambda: agent.of("new"))
    assert "agents" not in await told()


async def test_a_conversation_that_expires_is_told_as_one_that_is_deleted(opener: Any) -> None:
    store = await opener(sweep=0.1)
    agent = made(Recorder, store)
    async with hosted(agent):
        session = store.session("c", idle=0.3)
        await session.set("notes", ["kept"])
        await until(lambda: agent.of("deleted"))
        assert agent.of("deleted") == [("deleted", "c", False, ["kept"])], "by then it is over; the last state is there"
        await until(lambda: agent.conversation is None)


# Going on from a position


async def test_an_agent_runs_the_hooks_of_what_it_missed(store: Any) -> None:
    first = made(Recorder, store)
    async with hosted(first):
        began = first.position
        await store.session("a").create()
        await until(lambda: first.of("new") and first.position != began)  # which moves when the hook has ended
        position = first.position
    with pytest.raises(ConfigurationError, match="is not running"):
        first.position
    await store.session("a").append({"role": "user", "content": "hello"})
    await store.session("a").switch()
    await store.emit("news", {"number": 1})
    await store.delete("a")
    second = made(Recorder, store, since=position)
    async with hosted(second):
        await until(lambda: second.of("deleted") and second.of("event"))
        assert [seen[0] for seen in second.saw if seen[0] != "event"] == ["switched", "deleted"]
        before = second.position
        await store.session("b").create()
        await until(lambda: second.of("new") and second.position != before)
        later = second.position
    third = made(Recorder, store, since=later)
    async with hosted(third):
        await store.emit("done")
        await until(lambda: third.of("event"))
        assert len(third.saw) == 1, "nothing twice"


async def test_a_hook_that_has_not_run_is_not_behind_the_position(store: Any) -> None:
    """The negative control of going on: a position taken in a hook gives that hook again."""

    class Saving(Recorder):
        async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
            it: Any = self
            self.saw.append((conversation_id, it.position))

    first = made(Saving, store)
    async with hosted(first):
        await store.session("a").create()
        await until(lambda: first.saw)
    second = made(Recorder, store, since=first.saw[0][1])
    async with hosted(second):
        await until(lambda: second.of("new"))
    with pytest.raises(ConfigurationError, match="one position"):
        async with hosted(made(Recorder, store, name="x"), made(Recorder, store, name="y", since="oldest")):
            pass
    with pytest.raises(InvalidValue, match="since"):
        async with hosted(made(Recorder, store, since="nowhere")):
            pass


@pytest.mark.only(api="asyncio")
async def test_a_hook_that_waits_for_what_it_cancelled_ends_no_other(store: Any) -> None:
    class Cancelling(Recorder):
        async def on_event(self, event: Event) -> None:
            self.saw.append((event.type,))
            task = asyncio.create_task(asyncio.sleep(20))
            await asyncio.sleep(0)
            task.cancel()
            await task

    agent = made(Cancelling, store)
    async with hosted(agent):
        for n in range(3):
            await store.emit(f"a.{n}", subject="s")
        await until(lambda: agent.agent_context.errors == 3)
    assert agent.saw == [("a.0",), ("a.1",), ("a.2",)]


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_hook_that_found_a_server_away_is_run_again(store: Any, failures: int, caplog: Any) -> None:
    """Its event would not come again. After three times it is given up, and the next event comes."""

    class Reading(Recorder):
        async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
            self.saw.append(("new", conversation_id))
            if conversation_id == "a" and self.saw.count(("new", "a")) <= failures:
                raise WarmUnavailable("the connection was cut")

    agent = made(Reading, store)
    async with hosted(agent):
        await store.session("a").create()
        await store.session("b").create()
        await until(lambda: agent.saw.count(("new", "a")) == min(failures + 1, 3) and ("new", "b") in agent.saw)
    assert len(agent.saw) == min(failures + 1, 3) + 1
    assert agent.agent_context.errors == (failures == 3)
    assert len([r for r in caplog.records if "run again" in r.getMessage()]) == min(failures, 2)


async def test_a_signal_at_the_very_end_changes_nothing(store: Any) -> None:
    agent = made(Recorder, store)
    async with hosted(agent):
        run = run_of(agent)
    for signalled in (run.request_reload, run.request_status, run.stop):
        signalled()
