"""A policy is asked before anything is: every public method is in the table, and none gets past a refusal."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from below import tiers, until
from counting import asked
from diverging import QUIET, keep, lose
from pydantic import BaseModel

from distributed_state import (
    AccessDenied,
    AgentState,
    AsyncTurn,
    ConfigurationError,
    InvalidValue,
    NotFound,
    Request,
    StateMachine,
    Transaction,
    Workflow,
    tool,
)
from distributed_state.agents.asyncio import AsyncAgent, AsyncHost
from distributed_state.agents.blocking import Agent, Host
from distributed_state.conversation.session import AsyncSession, AsyncTypedSession
from distributed_state.events.consumer import AsyncEvents
from distributed_state.records.items import AsyncItems
from distributed_state.records.record import AsyncRecord
from distributed_state.records.transaction import AsyncBatch, AsyncTransaction
from distributed_state.records.typed import AsyncEdit, AsyncTypedRecord
from distributed_state.store.admin import AsyncAdmin
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import Admin, Batch, StateStore
from distributed_state.store.blocking_contexts import Edit, Lease, TransactionBody, Turn
from distributed_state.store.blocking_events import Events
from distributed_state.store.blocking_records import Items, Record, Session, TypedRecord, TypedSession
from distributed_state.tiers.changes import Changes
from distributed_state.warm.lease import AsyncLease


@tool(name="count")
def count(state: Any, amount: int) -> None:
    """Add to a field."""
    state["a"] += amount


STEPS = StateMachine({("p", "begin"): "q"}, initial="p", name="steps")
STATE = ("goal", "plan_steps", "completed_steps", "iteration", "created_at", "updated_at")
Case = tuple[Callable[[Any], Awaitable[Any]], list[tuple[str, str | None]]]
M, P, T, V, Q = "#messages", "#phase", "#tags", "#version", "#items"


async def _transaction(session: Any) -> None:
    async with session.transaction() as view:
        view["a"] = view["a"]
        view.append({"role": "user", "content": "x"})
        view.move_to("b")
        assert view.phase == "p"


async def _batch(store: Any) -> None:
    async with store.batch() as batch:
        batch.on(store.session("s")).set("a", 1)
        batch.on(store.session("t")).append({"role": "user", "content": "x"})


async def _locked(session: Any) -> None:
    async with session.lock():
        pass


async def _dropped(admin: Any) -> None:
    with suppress(NotFound):
        await admin.drop_branch("s", "1-none")


async def _replaced(session: Any) -> None:
    await session.replace_messages([{"role": "user"}], after=0)
    await session.replace_messages([{"role": "user"}], expect_last=1)


async def _applied(session: Any) -> None:
    await session.apply(lambda view: view.update(a=2))


async def _followed(session: Any) -> None:
    async with session.output("r") as output:
        await output.next(0)


async def _turn(session: Any) -> None:
    async with session.turn(request_id="r") as turn:
        turn["b"] = turn.get("a")
        await turn.messages()
        await turn.window(max_tokens=100)
        turn.append({"role": "user", "content": "y"})
        turn.transition("begin", machine=STEPS)
        turn.outcome = 1


# What each method of a session asks for, in order: on a record with field a, a message, phase p, checkpoint l.
async def _answered(session: Any) -> None:
    with pytest.raises(NotFound, match="no open question"):
        await session.answer("yes")


async def _retried(session: Any) -> None:
    with pytest.raises(NotFound, match="no handler"):
        await session.retry()


SESSION: dict[str, Case] = {
    "get": (lambda s: s.get("a"), [("read", "a")]),
    "has": (lambda s: s.has("a"), [("read", "a")]),
    "get_all": (lambda s: s.get_all(), [("read", None), ("read", "a")]),
    "view": (lambda s: s.view(), [("read", None), ("read", V), ("read", P), ("read", T), ("read", "a")]),
    "tags": (lambda s: s.tags(), [("read", T)]),
    "version": (lambda s: s.version(), [("read", V)]),
    "exists": (lambda s: s.exists(), [("read", V)]),
    "messages": (lambda s: s.messages(), [("read", M)]),
    "raw_messages": (lambda s: s.raw_messages(), [("read", M)]),
    "window": (
        lambda s: s.window(
            max_tokens=9,
            keep_last=0,
            counter=lambda message: 1 if message.role == "system" else 10,
            strategy="summarize",
            summarizer=lambda messages, previous: "they met",
        ),
        [("read", M), ("lock", None), ("write", M)],
    ),
    "context": (lambda s: s.context(), [("read", None), ("read", M), ("read", P), ("read", "a")]),
    "phase": (lambda s: s.phase(), [("read", P)]),
    "set": (lambda s: s.set("a", 1), [("write", "a")]),
    "set_many": (lambda s: s.set_many({"a": 1, "b": 2}), [("write", "a"), ("write", "b")]),
    "delete": (lambda s: s.delete("a"), [("write", "a")]),
    "clear": (lambda s: s.clear(), [("write", None)]),
    "update": (lambda s: s.update("d", {}), [("write", "d")]),
    "append_to": (lambda s: s.append_to("l", 1), [("write", "l")]),
    "increment": (lambda s: s.increment("n"), [("read", "n"), ("write", "n")]),
    "write": (
        lambda s: s.write(set={"a": 1}, increment={"n": 1}, append=[{"role": "user"}], phase="q"),
        [("write", "a"), ("read", "n"), ("write", "n"), ("write", P), ("write", M)],
    ),
    "initialize": (lambda s: s.initialize({"new": 1}), [("read", None), ("write", "new")]),
    "export_state": (
        lambda s: s.export_state(messages=True),
        [("read", P), ("read", M), ("read", None), ("read", "a")],
    ),
    "restore_state": (lambda s: s.restore_state({"fields": {"b": 1}}), [("write", None), ("write", "b")]),
    "create": (lambda s: s._create(), [("write", "a"), ("write", None)]),
    "append": (lambda s: s.append({"role": "user"}), [("write", M)]),
    "pop_message": (lambda s: s.pop_message(), [("read", M), ("write", M)]),
    "replace_messages": (_replaced, [("read", M), ("write", M)]),
    "transaction": (
        _transaction,
        [("read", V), ("read", "a"), ("read", P), ("write", "a"), ("write", P), ("write", M)],
    ),
    "apply": (_applied, [("read", V), ("write", "a")]),
    "lock": (_locked, [("lock", None)]),
    "output": (_followed, [("read", M)]),
    "stop": (lambda s: s.stop("r", reason="enough"), [("write", V)]),
    "post": (lambda s: s.post({"role": "user"}, request_id="r"), [("write", M)]),
    "inbox": (lambda s: s.inbox(), [("read", M)]),
    "withdraw": (lambda s: s.withdraw(1), [("write", M)]),
    "wake": (lambda s: s.wake("x", after=9), [("write", M)]),
    "wakes": (lambda s: s.wakes(), [("read", M)]),
    "cancel_wake": (lambda s: s.cancel_wake("none"), [("read", M)]),
    "retry": (_retried, [("write", M)]),
    "answer": (_answered, [("read", "ask.")]),
    "history": (lambda s: s.history(), [("read", None), ("read", "a"), ("read", M), ("read", P)]),
    "at": (lambda s: s.at(version=1), [("read", None), ("read", "a"), ("read", M), ("read", P)]),
    "checkpoint": (lambda s: s.checkpoint("l"), [("write", V)]),
    "checkpoints": (lambda s: s.checkpoints(), [("read", V)]),
    "rollback": (lambda s: s.rollback(version=1), [("write", None)]),
    "turn": (
        _turn,
        [
            ("lock", None),
            ("read", V),
            ("read", "a"),
            ("read", M),
            ("read", P),
            ("write", "b"),
            ("write", P),
            ("write", M),
        ],
    ),
    "call": (
        lambda s: s.call(count, {"amount": 2}, call_id="c"),
        [("lock", None), ("read", V), ("read", "a"), ("write", "a")],
    ),
    "transition": (lambda s: s.transition("begin", machine=STEPS), [("read", P), ("write", P)]),
    "load_state": (lambda s: s.load_state(), [("read", None)]),
    "save_state": (
        lambda s: s._save(),
        [("write", f"agent.{name}") for name in STATE] + [("write", P), ("write", M)],
    ),
    "switch": (lambda s: s.switch(previous_id="t"), [("write", V), ("read", V)]),
    "lifetime": (lambda s: s.lifetime(), [("read", V)]),
    "usage": (lambda s: s.usage(), [("read", V)]),
    "set_lifetime": (lambda s: s.set_lifetime(idle=60), [("write", None)]),
    "fork": (
        lambda s: s.fork("f"),
        [
            ("read", None),
            ("write", None),
            ("read", "a"),
            ("read", P),
            ("read", M),
            ("write", "a"),
            ("write", P),
            ("write", M),
        ],
    ),
}

# Likewise those of a collection of its items.
ITEMS: dict[str, Case] = {
    "get": (lambda s: s.items("x").get("k"), [("read", Q)]),
    "get_many": (lambda s: s.items("x").get_many(["k"]), [("read", Q)]),
    "find": (lambda s: s.items("x").find("k", version=1), [("read", Q)]),
    "find_many": (lambda s: s.items("x").find_many(["k"]), [("read", Q)]),
    "exists": (lambda s: s.items("x").exists("k"), [("read", Q)]),
    "list": (lambda s: s.items("x").list(), [("read", Q)]),
    "put": (lambda s: s.items("x").put("k", 1), [("write", Q)]),
    "put_many": (lambda s: s.items("x").put_many({"k": 1}, if_absent=True), [("read", Q), ("write", Q)]),
    "put_missing": (lambda s: s.items("x").put_missing({"k": 1}), [("read", Q), ("write", Q)]),
    "delete": (lambda s: s.items("x").delete("k"), [("write", Q)]),
}
RECORD = SESSION | {f"items.{name}": case for name, case in ITEMS.items()}


class Trip(BaseModel):
    """A schema for the record of these tests."""

    a: int = 0
    b: int = 0


async def _edit(session: Any) -> None:
    async with session.edit() as trip:
        trip.b = 2


# What a typed handle has besides, and what it does another way.
TYPED: dict[str, Case] = {
    "load": (lambda s: s.load(), [("read", None), ("read", "a")]),
    "edit": (_edit, [("read", None), ("read", "a"), ("write", "b")]),
    "modify": (lambda s: s.modify(lambda trip: Trip(b=2, a=trip.a)), [("read", None), ("read", "a"), ("write", "b")]),
    "is_older": (lambda s: s.is_older(), [("read", V)]),
    "upcast": (lambda s: s.upcast(), [("write", None)]),
    "get": (lambda s: s.get("a"), [("read", "a")]),
    "has": (lambda s: s.has("a"), [("read", "a")]),
    "get_all": (lambda s: s.get_all(), [("read", None), ("read", "a")]),
    "set": (lambda s: s.set("a", 2), [("write", "a")]),
    "increment": (lambda s: s.increment("b"), [("read", "b"), ("write", "b")]),
}


async def _listen(store: Any) -> None:
    async with store.events():
        pass


async def _hear(store: Any) -> None:
    await store.off(store.on("*", print))


async def _worked(store: Any) -> None:
    store.handler("a", print)
    working = asyncio.ensure_future(store.work())
    await asyncio.sleep(0.05)
    store.stop_working()
    await working


async def _announce(store: Any) -> None:
    store.announce(mood="good")


async def _index(admin: Any) -> None:
    await admin.update_index()
    await admin.remove_index()  # others share the database


async def _search(store: Any) -> None:
    with suppress(ConfigurationError):  # it is off
        await store.search("nothing")


STORE: dict[str, Case] = {
    "get_many": (
        lambda s: s.get_many([s.session("s"), s.session("t")]),
        [("read", None), ("read", None), ("read", "a")],
    ),
    "batch": (_batch, [("write", "a"), ("write", M)]),
    "delete": (lambda s: s.delete("s"), [("write", None)]),
    "sessions": (lambda s: s.sessions(user="u"), [("read", None)]),
    "asks": (lambda s: s.asks(user="u"), [("read", None), ("read", P)]),
    "usage": (lambda s: s.usage(user="u"), [("read", None)]),
    "work": (_worked, [("lock", None)]),
    "emit": (lambda s: s.emit("a.b", subject=s.session("s")), [("write", None)]),
    "activate_agent": (lambda s: s.activate_agent("notes"), [("read", None), ("write", None)]),
    "change_directory": (lambda s: s.change_directory("/b"), [("read", None), ("write", None)]),
    "events": (_listen, [("read", None)]),
    "on": (_hear, [("read", None)]),
    "search": (_search, [("read", None)]),
    "run": (
        lambda s: s.run(Workflow({"planning": lambda state, turn: state.to_done("yes")}), "go", session_id="w"),
        [("lock", None), ("read", V)],
    ),
    "forget": (lambda s: s.forget("u"), [("admin", None)]),
    "erase": (lambda s: s.erase("s"), [("admin", None)]),
    "announce": (_announce, [("write", None)]),
}
ADMIN: dict[str, Case] = {
    "reload_config": (lambda s: s.reload_config({"a": 1}), [("admin", None), ("write", "all")]),
    "audit": (lambda s: s.audit(), [("read", None)]),
    "replicas": (lambda s: s.replicas(), [("admin", None)]),
    "leases": (lambda s: s.leases(), [("admin", None)]),
    "end_lease": (lambda s: s.end_lease("s", 1), [("admin", None)]),
    "branches": (lambda s: s.branches(), [("admin", None)]),
    "export": (lambda s: s.export("s"), [("admin", None)]),
    "import_": (lambda s: s.import_(LINES, id="copy"), [("admin", None)]),
    "reencrypt": (lambda s: s.reencrypt(), [("admin", None)]),
    "repair": (lambda s: s.repair(), [("admin", None)]),
    "compact": (lambda s: s.compact(), [("admin", None)]),
    "update_index": (_index, [("admin", None), ("admin", None)]),
    "remove_index": (lambda s: s.remove_index(), [("admin", None)]),
    "purge": (lambda s: s.purge(older_than=0), [("admin", None)]),
    "upcast": (lambda s: s.upcast(Trip), [("admin", None)]),
    "archive": (lambda s: s.archive(), [("admin", None)]),
    "doctor": (lambda s: s.doctor(), [("admin", None)]),
    "stats": (lambda s: s.stats(), [("read", None)]),
    "branches of": (lambda s: s.branches("s"), [("read", None)]),
    "drop_branch": (_dropped, [("admin", None)]),
    "cleanup": (lambda s: s.cleanup("s", days=0), [("write", M)]),
}
LINES = [
    '{"format":"distributed_state/1","scope":"session","id":"x","version":1,"messages":0,"changes":1}',
    '{"version":1,"time_ms":1,"kind":"set","actor":"","token":0,"event":"a.1.b","ops":[["s","a","1"]]}',
]


async def _saved(turn: Any) -> None:
    state = AgentState.from_user_input("go", session_id=raw(turn).session.id)
    await turn.save_state(state.model_copy(update={"history": (*await turn.messages(), *state.history)}))


# What a view of the fields asks for while it is open: in a transaction and in a turn, which asked when they opened.
VIEW: dict[str, Case] = {
    "__iter__": (lambda v: list(raw(v)), [("read", None), ("read", "a")]),
    "__len__": (lambda v: len(raw(v)), [("read", None), ("read", "a")]),
    "__eq__": (lambda v: raw(v) == {}, [("read", None), ("read", "a")]),
    "__contains__": (lambda v: "a" in raw(v), [("read", "a")]),
    "__getitem__": (lambda v: v["a"], [("read", "a")]),
    "__setitem__": (lambda v: raw(v).__setitem__("b", 1), [("write", "b")]),
    "__delitem__": (lambda v: raw(v).__delitem__("a"), [("read", "a"), ("write", "a")]),
    "keys": (lambda v: list(raw(v).keys()), [("read", None), ("read", "a")]),
    "items": (lambda v: list(raw(v).items()), [("read", None), ("read", "a")]),
    "values": (lambda v: list(raw(v).values()), [("read", None), ("read", "a")]),
    "get": (lambda v: v.get("a"), [("read", "a")]),
    "pop": (lambda v: v.pop("a"), [("read", "a"), ("write", "a")]),
    "popitem": (lambda v: v.popitem(), [("read", None), ("read", "a"), ("write", "a")]),
    "setdefault": (lambda v: v.setdefault("b", 1), [("read", "b"), ("write", "b")]),
    "update": (lambda v: v.update(b=1), [("write", "b")]),
    "clear": (lambda v: v.clear(), [("read", None), ("read", "a"), ("write", "a")]),
    "append": (lambda v: v.append({"role": "user"}), [("write", M)]),
    "move_to": (lambda v: v.move_to("q"), [("write", P)]),
    "tag": (lambda v: v.tag("k", "v"), [("write", T)]),
    "untag": (lambda v: v.untag("k", "v"), [("write", T)]),
    "phase": (lambda v: v.phase, [("read", P)]),
    "put_item": (lambda v: v.put_item("x", "k", 1), [("write", Q)]),
    "delete_item": (lambda v: v.delete_item("x", "k"), [("write", Q)]),
}
TURN: dict[str, Case] = {
    "transition": (lambda t: t.transition("begin", machine=STEPS), [("read", P), ("write", P)]),
    "messages": (lambda t: t.messages(), [("read", M)]),
    "window": (lambda t: t.window(max_tokens=100), [("read", M)]),
    "load_state": (lambda t: t.load_state(), [("read", None), ("read", M)]),
    "save_state": (
        _saved,
        [("read", M)] + [("write", f"agent.{name}") for name in STATE] + [("write", P), ("write", M)],
    ),
    "call": (lambda t: t.call(count, {"amount": 2}), [("read", "a"), ("write", "a")]),
    "stream": (lambda t: t.stream("x"), [("write", M)]),
    "inbox": (lambda t: t.inbox, [("read", M)]),
    "take": (lambda t: t.take(), [("read", M)]),
    "arrived": (lambda t: t.arrived(), [("read", M)]),
    "wake": (lambda t: t.wake("x", after=9), [("write", M)]),
    "ask": (lambda t: t.ask("?"), [("write", "ask."), ("write", P)]),
}


def raw(view: Any) -> Any:
    """The view itself: what asks no server needs no thread of its own."""
    return getattr(view, "it", view)


LOCAL, OPENING, OWN = "of this process alone", "asked when it was opened", "what the caller did here"
HANDLE, WRITING, STORE_USER = (
    "makes a handle, which asks",
    "asked when it is committed",
    "through the store, which asks",
)
# Who has nobody to ask, and why. These and the rows above are one table: what each public method asks of the policy.
UNASKED: dict[str, dict[str, str]] = {
    "STORE": dict.fromkeys(("session", "user", "app", "task"), HANDLE)
    | dict.fromkeys(
        ("open", "close", "off", "ready", "invalidate", "acting_as", "durable", "settings", "replica"), LOCAL
    )
    | dict.fromkeys(("handler", "stop_working"), LOCAL)
    | dict.fromkeys(("aio", "blocking"), LOCAL)
    | {"time": "the server's clock is nobody's state", "admin": HANDLE},
    "ADMIN": {},
    "SESSION": dict.fromkeys(("id", "ref", "ephemeral"), LOCAL) | {"items": HANDLE},
    "ITEMS": {"collection": LOCAL},
    "TYPED": {},
    "VIEW": {"version": OPENING},
    "TURN": dict.fromkeys(
        ("version", "token", "epoch", "lost", "suspends", "repeated", "request_id", "session"), OPENING
    )
    | dict.fromkeys(("pending", "outcome", "state", "tool_calls", "written", "answered_version"), OWN)
    | dict.fromkeys(("model", "usage", "tool", "times", "reported", "flush", "stopping", "stoppable", "serve"), OWN)
    | {"end_if_stopped": OWN},
    "BATCH": {"on": WRITING, "versions": OWN},
    "CHANGES": dict.fromkeys(
        ("append", "clear", "delete", "increment", "label", "leave", "set_lifetime", "phase", "put", "reserved", "set"),
        WRITING,
    )
    | dict.fromkeys(("set_many", "emit", "undelete", "wipe", "copy_messages", "tag", "untag", "put_tags"), WRITING)
    | dict.fromkeys(("answered", "post", "take", "wake"), WRITING)
    | dict.fromkeys(("put_item", "delete_item", "items", "layer"), WRITING)
    | dict.fromkeys(("copy", "detach", "draft", "fields", "put_items", "whole"), OWN),
    "EVENTS": dict.fromkeys(
        ("next", "close", "position", "waiting", "asks", "count_in", "end", "join", "leave"), OPENING
    ),
    "LEASE": dict.fromkeys(("acquire", "release", "lost", "token", "acquire_and", "fenced", "release_call"), OPENING)
    | dict.fromkeys(("release_answered", "leave", "lose", "protect", "renewed"), OPENING)
    | dict.fromkeys(("granted", "orphaned", "wanted", "check", "resume", "output", "ending_output"), OPENING)
    | dict.fromkeys(("ask_to_stop", "end_body", "absorb", "serve", "stoppable"), OPENING)
    | dict.fromkeys(("carried", "numbers", "stop_seen", "stopped", "streamed"), OPENING),
    "EDIT": {"finish": WRITING},
    "AGENT": dict.fromkeys((name for name in dir(AsyncAgent) if name.startswith("on_")), "a hook, called by the host")
    | dict.fromkeys(("conversation", "store", "run", "run_command", "main_loop", "initialize", "cleanup"), STORE_USER)
    | dict.fromkeys(("activate", "change_directory"), STORE_USER)
    | dict.fromkeys(("conversation_defaults", "persistent", "persistent_defaults", "status"), STORE_USER)
    | dict.fromkeys(("Config", "client", "config", "conversation_id", "follow", "limits", "log", "paused"), LOCAL)
    | dict.fromkeys(("agent_context", "listeners", "visible"), LOCAL)
    | dict.fromkeys(("get_invocation_directory", "get_working_directory", "pause", "pause_when_inactive"), LOCAL)
    | dict.fromkeys(("position", "register_command", "register_section", "reload", "report_progress"), LOCAL)
    | dict.fromkeys(("resume", "set_description", "set_system_prompt", "shown", "shutdown_timeout", "slow_hook"), LOCAL)
    | dict.fromkeys(("start", "stop", "stopping", "stuck_hook", "update_section", "wait", "watch_config"), LOCAL)
    | dict.fromkeys(("unregister_command", "unregister_section"), LOCAL),
    "HOST": dict.fromkeys(("run", "stop"), LOCAL),
}
TABLE: dict[str, tuple[tuple[type, ...], dict[str, Case]]] = {
    "STORE": ((AsyncStateStore, StateStore), STORE),
    "ADMIN": ((AsyncAdmin, Admin), ADMIN),
    "SESSION": ((AsyncSession, Session, AsyncRecord, Record), SESSION),
    "TYPED": ((AsyncTypedSession, TypedSession, AsyncTypedRecord, TypedRecord), TYPED),
    "ITEMS": ((AsyncItems, Items), ITEMS),
    "VIEW": ((Transaction,), VIEW),
    "TURN": ((AsyncTurn, Turn), TURN),
    "BATCH": ((AsyncBatch, Batch), {}),
    "CHANGES": ((Changes,), {}),
    "EVENTS": ((AsyncEvents, Events), {}),
    "LEASE": ((AsyncLease, Lease), {}),
    "EDIT": ((AsyncEdit, Edit, AsyncTransaction, TransactionBody), {}),
    "AGENT": ((AsyncAgent, Agent), {}),
    "HOST": ((AsyncHost, Host), {}),
}
INHERITS = {"TYPED": "SESSION", "TURN": "VIEW"}


def methods(api: type) -> set[str]:
    """What a user can call or read, the operators of a dict included."""
    found = {name for name in dir(api) if not name.startswith("_")}
    return found | {name for name in VIEW if name in dir(api) and issubclass(api, Mapping)}


@pytest.mark.parametrize("name", TABLE)
def test_every_public_method_is_in_the_table(name: str) -> None:
    """The code's own list of them, on both APIs, and the rows are the same: a new one cannot be forgotten."""
    apis, rows = TABLE[name]
    known = {row.partition(" ")[0] for row in rows} | set(UNASKED[name])
    if name in INHERITS:
        known |= set(TABLE[INHERITS[name]][1]) | set(UNASKED[INHERITS[name]])
    there = set().union(*(methods(api) for api in apis))
    what = f"of {apis[0].__name__}: what does it ask of the access policy? In {__file__}"
    missing, gone = (
        sorted(there - known),
        sorted(({row.partition(" ")[0] for row in rows} | set(UNASKED[name])) - there),
    )
    assert not missing, (
        f"{', '.join(missing)} {what} add for each either a row to {name}, "
        f'"{missing[0]}": (lambda it: it.{missing[0]}(...), [("read", "a"), ...]), a call on a record that has a field '
        f"a, a message and phase p, and each (action, field) that it has to ask for, in order (the tests then see that "
        f'it asks for just these, and does nothing where one is denied); or "{missing[0]}": "why nobody has to be '
        f'asked" to UNASKED["{name}"]. The rights: read, write, lock, admin; the fields: see access.Request.'
    )
    assert not gone, f"{', '.join(gone)} {what} there is a row, and no such method: take it out of {name} or UNASKED."
    assert not set(rows) & set(UNASKED[name]), "either it asks, or it does not"


class Rules:
    """A policy that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.allow: Callable[[Request], Any] = lambda request: True

    def __call__(self, request: Request) -> bool:
        self.asked.append(request)
        return self.allow(request)  # type: ignore[no-any-return]

    def told(self) -> list[tuple[str, str | None]]:
        return [(request.action, request.field) for request in self.asked]


STILL: dict[str, Any] = {"archiver": False, "beat": 0.0, "partitions": 4}


async def guarded(opener: Any) -> tuple[Any, Rules]:
    rules = Rules()
    store = await opener(access=rules, **STILL)
    session = store.session("s", user="u", actor="a")
    await session.write(set={"a": 1}, append=[{"role": "user", "content": "x"}], phase="p")
    await store.admin.archive()
    rules.asked.clear()
    return store, rules


def new(store: Any, session: Any) -> Any:
    """For `create` and `save_state`, which need a record that is not there."""

    class New:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def _create(self) -> Any:
            return store.session("new", user="u", actor="a").create({"a": 1})

        def _save(self) -> Any:
            state = AgentState.from_user_input("go", session_id="new")
            return store.session("new", user="u", actor="a").save_state(state)

    return New()


@pytest.mark.parametrize("name", RECORD)
async def test_a_record_asks_for_what_it_does(opener: Any, name: str) -> None:
    store, rules = await guarded(opener)
    call, expected = RECORD[name]
    await call(new(store, store.session("s", user="u", actor="a")))
    distinct = list(dict.fromkeys(rules.told()))
    assert distinct == expected
    for request in rules.asked:
        assert (request.actor, request.scope, request.user) == ("a", "session", "u")
        assert request.id in ("s", "f", "new")


async def test_a_denied_record_does_nothing(opener: Any) -> None:
    """Each of the things asked for is denied in turn; of the first nothing reaches the server."""
    store, rules = await guarded(opener)
    session = store.session("s", user="u", actor="a")
    for name, (call, expected) in RECORD.items():
        for action, field in expected:
            rules.allow = lambda request, denied=(action, field): (request.action, request.field) != denied
            with pytest.raises(AccessDenied):
                await call(new(store, session))
        rules.allow = lambda request: True
        assert await session.version(fresh=True) == 1, name
        assert not await store.session("f").exists(fresh=True), name
        assert not await store.session("new").exists(fresh=True), name


@pytest.mark.parametrize("collection", ["#qx", "#bx", "##x", "#phase"])
async def test_an_item_is_asked_for_whatever_its_collection_is_called(opener: Any, collection: str) -> None:
    store, rules = await guarded(opener)
    rules.allow = lambda request: (request.action, request.field) != ("write", Q)
    with pytest.raises(AccessDenied):
        await store.session("s").items(collection).put("k", 1)


@pytest.mark.parametrize("name", TYPED)
async def test_a_typed_record_asks_for_what_it_does(opener: Any, name: str) -> None:
    store, rules = await guarded(opener)
    session = store.session("s", schema=Trip, actor="a")
    call, expected = TYPED[name]
    for action, field in expected:
        rules.allow = lambda request, denied=(action, field): (request.action, request.field) != denied
        with pytest.raises(AccessDenied):
            await call(session)
    rules.allow = lambda request: True
    assert await session.version(fresh=True) == 1
    rules.asked.clear()
    await call(session)
    assert list(dict.fromkeys(rules.told())) == expected


@pytest.mark.only(warm="real")
async def test_a_denial_costs_no_round_trip(opener: Any) -> None:
    store, rules = await guarded(opener)
    session = new(store, store.session("s", user="u", actor="a"))
    rules.allow = lambda request: False
    with asked(store) as seen:
        for call, _ in SESSION.values():
            with pytest.raises(AccessDenied):
                await call(session)
        for call, _ in TYPED.values():
            with pytest.raises(AccessDenied):
                await call(store.session("s", schema=Trip))
        for call, _ in STORE.values():
            with pytest.raises(AccessDenied):
                await call(store)
        for call, _ in ADMIN.values():
            with pytest.raises(AccessDenied):
                await call(store.admin)
    assert [each for each in seen.sent if ":r:session:" in each] == []
    rules.allow = lambda request: True
    with asked(store) as seen:
        await session.version(fresh=True)
    assert [each for each in seen.sent if ":r:session:" in each], "this is how it would look"


@pytest.mark.parametrize("name", [*STORE, *(f"admin.{name}" for name in ADMIN)])
async def test_the_store_asks_for_what_it_does(opener: Any, name: str) -> None:
    from distributed_state import Encryption, KeyRing

    rules = Rules()
    encryption = Encryption(KeyRing({"k": bytes(32)}), accept_plaintext=True)
    store = await opener(access=rules, encryption=encryption, **STILL)
    await store.session("s", user="u").set("a", 1)
    await store.admin.archive()
    of_admin, name = name.startswith("admin."), name.removeprefix("admin.")
    call, expected = (ADMIN if of_admin else STORE)[name]
    for action, field in dict.fromkeys(expected):
        rules.allow = lambda request, denied=(action, field): (request.action, request.field) != denied
        with pytest.raises(AccessDenied):
            await call(store.admin if of_admin else store)
    rules.allow = lambda request: True
    assert await store.session("s").version(fresh=True) == 1
    assert not await store.session("t").exists(fresh=True)
    assert not await store.session("copy").exists(fresh=True)
    rules.asked.clear()
    await call(store.admin if of_admin else store)
    # A run is turns, which ask on for what its steps read and write.
    assert (rules.told()[: len(expected)] if name == "run" else rules.told()) == expected
    whole = rules.asked[0]
    if name == "sessions":
        assert whole == Request("", "read", "session", None, None, "u")
    if name == "forget":
        assert whole == Request("", "admin", None, None, None, "u")
    if name == "purge":
        assert whole == Request("", "admin", None, None, None, None)
    if name in ("export", "delete", "erase", "cleanup", "drop_branch", "end_lease", "branches of"):
        assert (whole.scope, whole.id) == ("session", "s")
    if name == "import_":
        assert (whole.scope, whole.id) == ("session", "copy")


def opened(session: Any, kind: str) -> Any:
    return session.turn() if kind == "turn" else session.transaction()


@pytest.mark.parametrize(("kind", "rows"), [("transaction", VIEW), ("turn", VIEW | TURN)], ids=("transaction", "turn"))
async def test_a_view_asks_for_what_is_done_with_it(opener: Any, kind: str, rows: dict[str, Case]) -> None:
    """Exactly for that, and where one of it is denied nothing is changed."""
    store, rules = await guarded(opener)
    for name, (call, expected) in rows.items():
        rules.allow = lambda request: True
        session = store.session(f"s-{name}", user="u", actor="a")
        await session.write(set={"a": 1}, append=[{"role": "user", "content": "x"}], phase="p")

        async def do(session: Any = session, call: Any = call) -> None:
            rules.asked.clear()
            async with opened(session, kind) as view:
                rules.asked.clear()
                found = call(view)
                if inspect.isawaitable(found):
                    await found

        for denied in expected:
            # What opening asks for is in the rows of `turn` and `transaction`.
            rules.allow = lambda request, denied=denied: (request.action, request.field) != denied
            with pytest.raises(AccessDenied):
                await do()
        assert await session.version(fresh=True) == 1, name
        rules.allow = lambda request: True
        await do()
        assert list(dict.fromkeys(rules.told())) == expected, name


async def test_names_are_not_told_to_who_may_not_read_the_fields(opener: Any) -> None:
    """Neither by a view, nor to a tool, nor by the history of what was deleted, nor through a fork."""

    @tool(name="names")
    def names_of(state: Any) -> list[str]:
        """List the fields."""
        return list(state)

    store, rules = await guarded(opener)
    session = store.session("s", user="u", actor="a")
    await session.set("ssn", 1)
    await session.delete("ssn")
    rules.allow = lambda request: (request.action, request.field) != ("read", "ssn")
    with pytest.raises(AccessDenied, match="'ssn'"):
        await session.history()
    rules.allow = lambda request: True
    await session.set("ssn", 1)
    rules.allow = lambda request: (request.action, request.field) != ("read", "ssn")

    async def in_a_turn() -> None:
        async with session.turn() as turn:
            len(raw(turn))

    for call in (
        lambda: session.apply(list),
        lambda: session.apply(len),
        in_a_turn,
        lambda: session.call(names_of, {}, call_id="c"),
        lambda: session.fork("f"),
        lambda: session.fork("f", version=4),
    ):
        with pytest.raises(AccessDenied, match="may not read 'ssn' of session:s"):
            await call()
    assert not await store.session("f").exists(fresh=True)
    await session.fork("f", version=3)
    rules.allow = lambda request: (request.action, request.field) != ("read", M)
    with pytest.raises(AccessDenied, match="#messages"):
        await session.fork("g")


async def test_a_branch_is_read_like_the_record_that_it_is_of(opener: Any) -> None:
    rules = Rules()
    store = await opener(access=rules, **QUIET)
    session = store.session("s", user="u", actor="a")
    await session.set("a", 1)

    async def lost() -> None:
        await session.write(set={"ssn": 1}, append=[{"role": "user", "content": "x"}], phase="p")

    found = await lose(store, "s", lost)
    await keep(store, found)
    everything = [("read", None), ("read", "ssn"), ("read", M), ("read", P)]
    rules.asked.clear()
    await session.history(branch=found.epoch)
    assert rules.told() == everything
    for denied in everything:
        rules.allow = lambda request, denied=denied: (request.action, request.field) != denied
        for call in (session.history, session.at):
            with pytest.raises(AccessDenied):
                await call(branch=found.epoch)
        with pytest.raises(AccessDenied):
            await session.fork("f", branch=found.epoch)
    rules.allow = lambda request: True
    assert not await store.session("f").exists(fresh=True)


async def test_an_import_names_whose_record_it_will_be(opener: Any) -> None:
    store, rules = await guarded(opener)
    lines = await store.admin.export("s")
    await store.admin.purge(older_than=-0.0)
    rules.asked.clear()
    await store.admin.import_(lines, id="copy")
    assert [(each.action, each.id, each.user) for each in rules.asked] == [("admin", "copy", "u")]
    rules.allow = lambda request: request.user != "u"
    for file in lines, await _exported(store, rules):
        with pytest.raises(AccessDenied):
            await store.admin.import_(file, id="other")


async def _exported(store: Any, rules: Rules) -> list[str]:
    kept, rules.allow = rules.allow, lambda request: True
    lines: list[str] = await store.admin.export("s")
    rules.allow = kept
    return lines


async def test_a_hot_read_does_not_get_past_the_policy(opener: Any) -> None:
    store, rules = await guarded(opener)
    session = store.session("s", actor="a")

    async def hot() -> bool:
        await session.get("a")
        return "session:s" in tiers(store).hot.entries

    if tiers(store).link.up or opener.warm != "fake":
        await until(hot)
    assert await session.get("a") == 1
    rules.allow = lambda request: request.field != "a"
    for _ in range(2):
        with pytest.raises(AccessDenied, match=r"'a' may not read 'a' of session:s"):
            await session.get("a")
    with pytest.raises(AccessDenied):
        await session.get_all()


@pytest.mark.only(api="blocking")
async def test_without_a_policy_the_hot_shortcut_is_what_it_was(opener: Any) -> None:
    free, (bound, _) = await opener(namespace=f"{opener.namespace}-b", archive="memory"), await guarded(opener)
    assert free.session("s").it._peek.__name__ == "peek"
    assert bound.session("s").it._peek.__name__ != "peek"


async def test_a_policy_that_fails_denies(opener: Any) -> None:
    store, rules = await guarded(opener)

    def broken(request: Request) -> bool:
        raise LookupError("no such user")

    rules.allow = broken
    with pytest.raises(AccessDenied, match="the policy failed with LookupError") as caught:
        await store.session("s").get("a")
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("answer", [None, 1, "yes", [True]])
async def test_only_true_allows(opener: Any, answer: Any) -> None:
    store, rules = await guarded(opener)
    rules.allow = lambda request: answer
    with pytest.raises(AccessDenied):
        await store.session("s").get("a")


async def test_a_policy_that_would_have_to_be_awaited_is_refused(opener: Any) -> None:
    async def later(request: Request) -> bool:
        return False

    for policy in later, "no function":
        with pytest.raises(ConfigurationError, match="plain function"):
            await opener(access=policy)
    store, rules = await guarded(opener)
    rules.allow = later
    with pytest.raises(AccessDenied):
        await store.session("s").get("a")


async def test_a_rule_for_one_field_holds_wherever_the_field_is_read(opener: Any) -> None:
    """The plainest of policies, which forgets that there are more ways to read than `get`."""
    store, rules = await guarded(opener)
    session = store.session("s")
    await session.set("ssn", "123")
    await session.set("a", 2)
    await store.admin.archive()
    rules.allow = lambda request: request.field != "ssn"
    for call in (
        lambda: session.get("ssn"),
        lambda: session.get_all(),
        lambda: session.history(),
        lambda: session.at(version=2),
        lambda: store.get_many([session]),
        lambda: session.fork("mine"),
        lambda: session.increment("ssn"),
        lambda: session.rollback(version=1),
        lambda: session.apply(dict),
    ):
        with pytest.raises(AccessDenied, match="'ssn' of session:"):
            await call()
    assert await session.get("a") == 2
    assert not await store.session("mine").exists()
    assert [change.set for change in await session.history(after=2)] == [{"a": 2}]


async def test_a_batch_is_denied_before_any_of_it_is_sent(opener: Any) -> None:
    store, rules = await guarded(opener)
    rules.allow = lambda request: request.id != "t"
    with pytest.raises(AccessDenied):
        await _batch(store)
    rules.allow = lambda request: True
    assert await store.session("s").version(fresh=True) == 1


async def test_names_reach_the_policy_as_they_were_given(opener: Any) -> None:
    store, rules = await guarded(opener)
    await store.session("i:d\x00", user="u%:\x00", actor="a:\ud800").set("f\n", 1)
    assert rules.asked[-1] == Request("a:\ud800", "write", "session", "i:d\x00", "f\n", "u%:\x00")
    await store.user("u:1").get("x")
    assert rules.asked[-1] == Request("", "read", "user", "u:1", "x", "u:1")
    with pytest.raises((InvalidValue, AccessDenied)):
        await store.session("s").get(["not a name"])


def test_a_request_cannot_be_changed() -> None:
    request = Request("a", "read", "session", "s", None, None)
    with pytest.raises(AttributeError):
        request.actor = "root"  # type: ignore[misc]


async def test_a_state_is_read_like_what_it_is_made_of(opener: Any) -> None:
    rules = Rules()
    store = await opener(access=rules)
    state = AgentState.from_user_input("go", session_id="s")
    state = state.model_copy(update={"memory": state.memory.note("key", "hunter2")})
    await store.session("s").save_state(state)
    rules.asked.clear()
    await store.session("s").load_state()
    asked_for = {field for action, field in rules.told()}
    assert {None, M, P, "agent.goal", "agent.note.key"} <= asked_for
    rules.allow = lambda request: request.field != "agent.note.key"
    with pytest.raises(AccessDenied):
        await store.session("s").load_state()
    with pytest.raises(AccessDenied):
        async with store.session("s").turn() as turn:
            await turn.load_state()


async def test_what_a_tool_does_to_its_user_is_asked_of_the_user(opener: Any) -> None:
    @tool(name="like")
    def like(user_state: Any, what: str) -> None:
        """Remember what the user likes."""
        user_state["likes"] = what

    rules = Rules()
    store = await opener(access=rules)
    session = store.session("s", user="u", actor="a")
    rules.allow = lambda request: (request.scope, request.action) != ("user", "write")
    with pytest.raises(AccessDenied, match="'a' may not write 'likes' of user:u"):
        await session.call(like, {"what": "tea"}, call_id="1")
    assert await session.version(fresh=True) == 0
    rules.allow = lambda request: True
    await session.call(like, {"what": "tea"}, call_id="1")
    assert await store.user("u").get("likes", fresh=True) == "tea"


async def test_whoever_acts_is_whom_the_policy_hears_of(opener: Any) -> None:
    store, rules = await guarded(opener)
    rules.allow = lambda request: request.actor in ("user:7", "handle")
    session = store.session("s")
    with store.acting_as("user:7"):
        await session.set("a", 1)
        await store.sessions()
    with pytest.raises(AccessDenied, match="an unnamed caller"):
        await session.set("a", 2)
    await store.session("s", actor="handle").set("a", 3)


async def test_an_expected_phase_is_a_phase_read(opener: Any) -> None:
    """Who is told that it is another one, and which, has read it."""
    store = await opener(access=lambda request: (request.action, request.field) != ("read", "#phase"))
    with pytest.raises(AccessDenied, match="may not read '#phase'"):
        await store.session("s").write(set={"n": 1}, expect_phase="planning")
