"""Agents under Opperator daemons: what one daemon says, all replicas hear."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

import pytest
from below import until
from daemon import Here, Process
from examples.test_note_agent import NoteAgent
from opperator_agent import Noted, Troubled, Waiting
from sync_api import in_thread

from distributed_state import Agent, AsyncStateStore, CommandArgument, InvalidValue
from distributed_state.adapters.opperator import bridge

embedded = pytest.mark.only(api="blocking", warm="fake", cold="memory")


@pytest.mark.wide
@pytest.mark.only(api="blocking", warm="real", cold=("sqlite", "postgres"))
async def test_two_daemons_and_a_replica_share_notes_and_hear_the_same(opener: Any) -> None:
    store = await opener()
    with (
        Process(opener, "Noted", "--client", "home") as home,
        Process(opener, "Noted", "--client", "work") as work,
        NoteAgent(store.it) as replica,
    ):
        for daemon in (home, work):
            daemon.until("ready")
            assert daemon.of("agent_description") == [{"description": "Takes notes and lists them"}]
            registry = daemon.of("command_registry")[-1]["commands"]
            note = {"name": "note", "type": "string", "description": "What to note", "required": True}
            assert [command["name"] for command in registry] == ["add_note", "list_notes"]
            assert (registry[0]["arguments"], registry[0]["argument_required"]) == ([note], True)
        everybody = (home, work)

        def hook(*given: Any) -> None:
            for daemon in everybody:
                daemon.hook(*given)

        async def lists(run: Callable[[], Any], *notes: str) -> None:
            """What another replica wrote is in hot reads soon, not at once."""
            await until(lambda: run() == {"notes": [*notes]})

        assert home.ask("add_note", {"note": "lost"}) == {"error": "there is no conversation yet"}

        home.tell("new_conversation", conversation_id="monday", is_clear=False)
        assert home.ask("add_note", {"note": "buy milk"}) == {"added": "buy milk", "total": 1}
        hook("new", "monday", False)
        assert work.ask("list_notes") == {"notes": []}, "its user is nowhere yet"

        work.tell("conversation_switched", conversation_id="monday", previous_id="", message_count=4)
        assert work.ask("add_note", {"note": "call home"}) == {"added": "call home", "total": 2}
        await lists(lambda: home.ask("list_notes"), "buy milk", "call home")
        hook("switched", "monday", "", 4)
        work.until("sidebar_section", lambda data: data["content"] == "monday: 2 notes")
        at_replica = partial(replica.run_command, "list_notes", conversation_id="monday")
        await lists(at_replica, "buy milk", "call home")

        home.tell("conversation_switched", conversation_id="tuesday", previous_id="monday", message_count=0)
        assert home.ask("list_notes") == {"notes": []}
        assert work.ask("list_notes") == {"notes": ["buy milk", "call home"]}, "each user is where it is"
        hook("switched", "tuesday", "monday", 0)

        work.tell("new_conversation", conversation_id="monday", is_clear=True)
        assert work.ask("list_notes") == {"notes": []}
        hook("new", "monday", True)
        assert work.ask("add_note", {"note": "start over"})["total"] == 1

        home.tell("agent_deactivated", next_agent=None)
        home.tell("agent_activated", previous_agent="", conversation_id="monday")
        hook("activated", "", "monday")
        await lists(lambda: home.ask("list_notes"), "start over")
        home.tell("invocation_directory_changed", old_path="/a", new_path="/b")
        hook("directory", "/a", "/b")

        home.tell("conversation_deleted", conversation_id="monday")
        hook("deleted", "monday", 1)
        assert home.ask("list_notes") == {"notes": []}
        await until(lambda: not replica.store.session("monday").exists(fresh=True))

        replica.store.session("friday").create()
        hook("new", "friday", False)
        for daemon in everybody:
            daemon.hang_up()
            assert daemon.end() == 0
            assert daemon.hooks()[-1] == ("shutdown",)
            assert "a module may print\na hook may print\nand so may a child" in daemon.errors()

    seen = [[each for each in daemon.hooks() if each[0] != "shutdown"] for daemon in everybody]
    assert sorted(map(str, seen[0])) == sorted(map(str, seen[1])), "the same, each once"
    assert seen[0].count(("new", "monday", False)) == 1
    assert seen[0].count(("deactivated", None)) == 1
    clients = {event.data["client"] for event in await store.admin.audit(type="conversation.switched")}
    assert clients == {"home", "work"}
    history = await store.session("monday").history()
    assert {change.actor for change in history} == {"home", "work", "agent:note_agent"}


@embedded
async def test_a_conversation_that_is_called_new_again_is_not_emptied(store: Any) -> None:
    with Here(Noted(store.it)) as daemon:
        for _ in range(2):
            daemon.tell("new_conversation", conversation_id="c", is_clear=False)
            daemon.ask("add_note", {"note": "x"})
        assert daemon.ask("list_notes") == {"notes": ["x", "x"]}
        daemon.tell("new_conversation", conversation_id="fresh", is_clear=True)
        assert daemon.ask("list_notes") == {"notes": []}
        assert daemon.hooks() == [("new", "c", False), ("switched", "c", "", 0), ("new", "fresh", True)]


@embedded
async def test_what_was_deleted_is_deleted_once_and_may_begin_anew(store: Any) -> None:
    with Here(Noted(store.it)) as daemon:
        daemon.tell("conversation_deleted", conversation_id="never was")
        daemon.tell("new_conversation", conversation_id="c", is_clear=False)
        daemon.ask("add_note", {"note": "x"})
        daemon.tell("conversation_deleted", conversation_id="c")
        daemon.tell("conversation_deleted", conversation_id="c")
        assert "no conversation" in daemon.ask("add_note", {"note": "y"})["error"]
        daemon.tell("conversation_switched", conversation_id="c", previous_id=None, message_count="many")
        assert daemon.ask("list_notes") == {"notes": []}
        daemon.tell("conversation_deleted", conversation_id="c")
        daemon.tell("new_conversation", conversation_id="c", is_clear=True)
        assert daemon.ask("add_note", {"note": "z"})["total"] == 1
        begun, end = ("new", "c", False), ("deleted", "c", 0)
        cleared = ("new", "c", True)
        assert daemon.hooks() == [begun, ("deleted", "c", 1), begun, ("switched", "c", "", 0), end, cleared]


@embedded
@pytest.mark.parametrize("waits", [True, False])
async def test_a_command_finds_that_the_hooks_before_it_have_run(
    store: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(bridge, "_ARRIVES", 0.05)  # a hook may take longer than its event may take to arrive
    if not waits:
        monkeypatch.setattr(bridge.Publisher, "_wait_until", lambda *_: None)  # the negative control

    class Slow(Troubled):
        def on_conversation_switched(self, conversation_id: str) -> None:
            asked.wait(0.2 if waits else 10)
            self.ephemeral["at"] = conversation_id

        def where(self) -> Any:
            return [self.conversation_id, self.ephemeral.get("at"), self.get_invocation_directory()]

    with Here(Slow(store.it)) as daemon:
        daemon.tell("conversation_switched", conversation_id="c", previous_id="", message_count=0)
        daemon.tell("invocation_directory_changed", old_path="", new_path="/there")
        found = daemon.ask("where")
        asked.set()
        assert found == (["c", "c", "/there"] if waits else ["c", None, ""])
        if waits:
            assert daemon.ask("where", working_dir="/elsewhere") == ["c", "c", "/elsewhere"]
            assert daemon.ask("where") == ["c", "c", "/there"]


@embedded
async def test_each_of_many_commands_gets_its_own_answer(store: Any) -> None:
    with Here(Troubled(store.it)) as daemon:
        ids = {daemon.command("double", {"number": number}): number for number in range(50)}
        for id, number in ids.items():
            assert daemon.answer(id) == {"command_id": id, "success": True, "result": 2 * number}
            told = daemon.until("command_progress", lambda data, id=id: data["command_id"] == id)
            assert told == {
                "command_id": id, "text": "half way", "progress": 0.5, "status": "counting",
                "metadata": {"number": number},
            }  # fmt: skip
        assert len(daemon.of("response")) == 50
        registry = daemon.of("command_registry")[-1]["commands"]
        assert daemon.ask("__list_commands") == registry
        assert registry[0]["arguments"][1] == {"name": "factor", "type": "integer", "default": 0}
        assert daemon.of("system_prompt") == [{"prompt": "You are troubled."}]
        assert [data["section_id"] for data in daemon.of("sidebar_section")] == ["doomed"]
        assert daemon.of("sidebar_section_removal") == [{"section_id": "doomed"}]


class Defaulted(Agent):
    conversation_defaults = {"notes": []}  # noqa: RUF012 - as a user writes it

    def initialize(self) -> None:
        self.register_command("fields", lambda: self.conversation.get_all())
        self.register_command("add", self.add)
        self.register_command("broken", lambda: self.ephemeral.get("nothing").append(1))

    def on_new_conversation(self, conversation_id: str) -> None:
        self.log("INFO", "hook", hook="new", given=[conversation_id])

    def on_agent_activated(self, conversation_id: str) -> None:
        self.log("INFO", "hook", hook="activated", given=[conversation_id, self.conversation.get_all()])

    def add(self) -> None:
        self.conversation.append_to("notes", "x")


@pytest.mark.replicas
@pytest.mark.only(api="blocking")
@pytest.mark.parametrize("arrival", ["new_conversation", "conversation_switched", "agent_activated"])
async def test_the_first_command_of_a_conversation_finds_its_defaults(store: Any, arrival: str) -> None:
    with Here(Defaulted(store.it)) as daemon:
        for number in range(20):
            daemon.tell(arrival, conversation_id=f"c{number}")
            assert daemon.ask("fields") == {"notes": []}
        if arrival == "agent_activated":
            assert daemon.hooks()[:2] == [("new", "c0"), ("activated", "c0", {"notes": []})]


@pytest.mark.replicas
@pytest.mark.only(api="blocking")
async def test_a_command_finds_the_defaults_of_a_conversation_that_was_created_just_now(store: Any) -> None:
    with Defaulted(store.it) as agent:
        for number in range(20):
            store.it.session(f"c{number}").create()
            assert agent.run_command("fields", conversation_id=f"c{number}") == {"notes": []}
        assert agent.run_command("fields", conversation_id="not created at all") == {"notes": []}


@embedded
async def test_a_command_before_any_conversation_is_told_that_there_is_none(store: Any) -> None:
    with Here(Defaulted(store.it)) as daemon:
        for name in ("fields", "add"):
            assert daemon.answer(daemon.command(name))["error"] == f"{name}: no active conversation"
        daemon.tell("new_conversation", conversation_id="c", is_clear=False)
        assert daemon.ask("add") is None
        error = daemon.answer(daemon.command("broken"))["error"]
        assert error == "broken: AttributeError: 'NoneType' object has no attribute 'append'"


@embedded
async def test_a_daemon_gets_all_that_a_command_is_registered_with(store: Any) -> None:
    class Exposure(StrEnum):
        SLASH = "slash_command"

    class Described(Agent):
        def initialize(self) -> None:
            self.set_system_prompt("  You tidy up.\n", replace=True)
            self.register_command("gone", self.tidy)
            self.unregister_command("gone")
            self.update_section("status", "new")
            self.register_command(
                "tidy", self.tidy, title="Tidy up", description="Tidies", expose_as=[Exposure.SLASH, "agent_tool"],
                slash_command="tidy", slash_scope="global", argument_hint="<room>", async_enabled=True,
                progress_label="Tidying", hidden=True,
                arguments=[
                    CommandArgument("room", enum=["hall", "attic"], required=True),
                    CommandArgument("boxes", "array", items={"type": "integer"}),
                ],
            )  # fmt: skip

        def tidy(self, args: dict[str, Any]) -> Any:
            self.report_progress("half way", status="tidying", progress=0.5, metadata={"room": args["room"]})
            return args

    with Here(Described(store.it)) as daemon:
        daemon.until("ready")
        assert daemon.of("system_prompt") == [{"prompt": "You tidy up.", "replace": True}]
        assert daemon.of("sidebar_section")[0]["title"] == "status"
        assert daemon.of("command_registry")[-1]["commands"] == [
            {
                "name": "tidy", "title": "Tidy up", "description": "Tidies",
                "expose_as": ["slash_command", "agent_tool"],
                "slash_command": "tidy", "slash_scope": "global", "argument_hint": "<room>",
                "argument_required": True, "async": True, "progress_label": "Tidying", "hidden": True,
                "arguments": [
                    {"name": "room", "type": "string", "required": True, "enum": ["hall", "attic"]},
                    {"name": "boxes", "type": "array", "items": {"type": "integer"}},
                ],
            }
        ]  # fmt: skip
        assert daemon.ask("tidy", {"room": "attic"}) == {"room": "attic"}
        assert daemon.of("command_progress") == [
            {"command_id": "1", "text": "half way", "status": "tidying", "progress": 0.5, "metadata": {"room": "attic"}}
        ]
        assert "is one of 'hall', 'attic'" in daemon.answer(daemon.command("tidy", {"room": "cellar"}))["error"]


@embedded
@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("nothing", {}, "no command 'nothing'; there are double, fail"),
        ("double", {}, "double: argument 'number' is missing"),
        ("double", {"number": "7"}, "argument 'number' is of type integer, not str"),
        ("double", {"number": 7, "more": 1}, "takes no argument 'more'"),
        ("double", [7], "the arguments are an object, not a list"),
        ("double", "seven", "the arguments are an object, not a str"),
        ("fail", None, "fail: ValueError: it is the first of April"),
        ("leave", None, "leave: SystemExit: 3"),
        ("odd", None, "odd: "),
        (7, None, "no command ''"),
    ],
)
async def test_a_command_that_goes_wrong_is_answered(store: Any, name: Any, args: Any, error: str) -> None:
    with Here(Troubled(store.it)) as daemon:
        answer = daemon.answer(daemon.command(name, args))
        assert not answer["success"]
        assert error in answer["error"]
        assert daemon.ask("double", {"number": 1}) == 2


@embedded
async def test_what_is_not_understood_is_passed_over(store: Any) -> None:
    lines = [
        *(b"nonsense\n", b"\n", b"[1]\n", b"7\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"{}\n", b"null\n"),
        *(b'{"type": "command", "data": {"command": "double", "args": {"number": NaN}, "id": "n"}}\n',),
        *(b'{"type": ["command"], "data": {}}\n', b'{"type": "command"}\n', b'{"type": "command", "data": [1]}\n'),
        *(b'{"type": "poke", "data": {}}\n', b'{"type": "command", "data": {"command": "double", "id": 7}}\n'),
        *(b'{"type": "lifecycle_event", "data": {}}\n', b'{"type": "lifecycle_event", "data": {"event_type": 1}}\n'),
        b'{"type": "command", "data": {"command": "' + b"x" * (17 * 2**20) + b'"}}\n',
    ]
    events = [
        *[("moon_landing", {}), ("new_conversation", None), ("new_conversation", {}), ("conversation_deleted", {})],
        *[("new_conversation", {"conversation_id": 7}), ("conversation_switched", {"conversation_id": ""})],
        *[("conversation_switched", {"conversation_id": "c", "previous_id": ["x"]}), ("agent_activated", [])],
        *[("agent_deactivated", {"next_agent": 7}), ("invocation_directory_changed", {"new_path": None})],
        *[("new_conversation", {"conversation_id": "x" * 10_000})],
    ]
    with Here(Troubled(store.it)) as daemon:
        for line in lines:
            daemon.say(line)
        for event, data in events:
            daemon.send("lifecycle_event", event_type=event, data=data)
        assert daemon.ask("double", {"number": 21}) == 42
        passed = [data for data in daemon.of("log") if data["message"].startswith("ignored a ")]
        assert len(passed) == len(lines) - 1 + len(events), "each but the empty one"
        assert {data["level"] for data in passed} == {"warning"}
        assert any(data["fields"].get("bytes", 0) > 2**24 for data in passed)
        assert "nonsense" not in json.dumps(passed)
    assert await store.admin.audit() == []
    assert await store.sessions() == []


@embedded
async def test_what_is_logged_can_always_be_read(store: Any) -> None:
    with Here(Troubled(store.it)) as daemon:
        daemon.answer(daemon.command("odd"))
        told = daemon.until("log", lambda data: data["message"] == "odd")
        assert told["fields"]["nan"] == "nan"
        assert told["fields"]["keys"] == "{(1, 2): 3}"


@embedded
async def test_two_agents_of_one_daemon_hear_each_its_half_of_a_switch(store: Any) -> None:
    with Here(Noted(store.it, name="first")) as first, Here(Noted(store.it, name="second")) as second:
        first.until("ready")
        second.until("ready")
        first.tell("agent_activated", previous_agent=None, conversation_id="c")
        first.hook("activated", None, "c")
        second.tell("conversation_switched", conversation_id="c", previous_id="", message_count=0)
        second.hook("switched", "c", "", 0)
        first.tell("agent_deactivated", next_agent="second")
        first.hook("deactivated", "second")
        second.tell("agent_activated", previous_agent="first", conversation_id="c")
        second.hook("activated", "first", "c")
        store.it.emit("directory.changed", {"new_path": "/last"})
        for daemon in (first, second):
            daemon.hook("directory", "", "/last")
        assert first.hooks("activated", "deactivated") == [("activated", None, "c"), ("deactivated", "second")]
        assert second.hooks("activated", "deactivated") == [("activated", "first", "c")]
        assert (first.agent.active, second.agent.active) == (False, True)
    told = [(event.data["agent"], event.data["client"]) for event in await store.admin.audit(type="agent.switched")]
    assert told == [("first", "daemon"), ("first", "daemon"), ("second", "daemon")]


@embedded
async def test_what_may_not_be_told_is_logged_and_the_next_is_told(opener: Any) -> None:
    store = await opener(access=lambda request: request.id != "secret")
    with Here(Noted(store.it)) as daemon:
        daemon.tell("conversation_switched", conversation_id="secret", previous_id="", message_count=0)
        daemon.tell("conversation_switched", conversation_id="open", previous_id="", message_count=0)
        daemon.hook("switched", "open", "", 0)
        failed = [data for data in daemon.of("log") if data["level"] == "error"]
        assert [data["fields"]["error"].partition(":")[0] for data in failed] == ["AccessDenied"]


@embedded
async def test_an_agent_of_one_client_hears_no_other_but_its_daemon(store: Any) -> None:
    with Here(Noted(store.it, client="mine"), client="") as daemon:
        daemon.until("ready")
        store.it.session("theirs").switch(client="other")
        daemon.tell("conversation_switched", conversation_id="ours", previous_id="", message_count=3)
        daemon.hook("switched", "ours", "", 3)
        assert daemon.hooks("switched") == [("switched", "ours", "", 3)]
        assert daemon.agent.conversation_id == "ours"


async def test_messages_that_are_kept_elsewhere_are_counted_there(store: Any) -> None:
    await store.session("c").append({"role": "user", "content": "hello"})
    async with store.events("conversation.switched") as events:
        await store.session("c").switch()
        await store.session("c").switch(message_count=7)
        assert [(await events.next(10)).data["message_count"] for _ in range(2)] == [1, 7]
    for wrong in (-1, 1.5, "7", True):
        with pytest.raises(InvalidValue, match="message_count"):
            await store.session("c").switch(message_count=wrong)


@pytest.mark.only(api="asyncio", warm="fake", cold="memory")
async def test_an_agent_of_asyncio_is_served_too(opener: Any) -> None:
    agent = Waiting(lambda: AsyncStateStore.open(archive="memory", namespace=opener.namespace))

    def talk() -> None:
        with Here(agent) as daemon:
            daemon.tell("conversation_switched", conversation_id="c", previous_id="", message_count=0)
            assert daemon.ask("seen") == ["c", 1]
            daemon.tell("conversation_deleted", conversation_id="c")
            daemon.tell("new_conversation", conversation_id="c", is_clear=True)
            assert daemon.ask("seen") == ["c", 0]
            ids = [daemon.command("seen") for _ in range(20)]
            assert [daemon.answer(id)["success"] for id in ids] == [True] * 20
        assert daemon.failed is None

    await in_thread(talk)


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="real", cold=("sqlite", "postgres"))
async def test_an_agent_of_asyncio_is_a_process_too(opener: Any) -> None:
    store = await opener()
    with Process(opener, "Waiting") as daemon:
        daemon.tell("conversation_switched", conversation_id="c", previous_id="", message_count=0)
        assert daemon.ask("seen") == ["c", 1]
        assert await store.session("c").get("seen") == 1
        daemon.hang_up()
        assert daemon.end() == 0
        assert "Traceback" not in daemon.errors()


@pytest.mark.wide
@pytest.mark.only(api="blocking", warm="real", cold=("sqlite", "postgres"))
@pytest.mark.parametrize("agent", ["Missing", pytest.param("sys", marks=pytest.mark.full)])
async def test_what_is_no_agent_is_refused_in_one_line(opener: Any, agent: str) -> None:
    with Process(opener, agent) as daemon:
        assert daemon.end() == 1
        assert "error: 'opperator_agent:" in daemon.errors()
        assert "Traceback" not in daemon.errors()


@embedded
async def test_an_agent_that_cannot_begin_says_why(store: Any) -> None:
    class Broken(Troubled):
        def initialize(self) -> None:
            raise OSError("no such thing")

    with Here(Broken(store.it)) as daemon:
        daemon.until("error", lambda data: data == {"error": "OSError: no such thing", "code": 1})
    assert isinstance(daemon.failed, OSError)
