"""In which order an agent handles what its daemon sends. Law: one after another, unless a command asks otherwise."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from below import until
from daemon import Daemon, Here, Process
from opperator_agent import Noting

from distributed_state import Agent
from distributed_state.adapters.opperator import bridge, wire

embedded = pytest.mark.only(api="blocking", warm="fake", cold="memory")
TURNS = 400


def switch_and_note(daemon: Daemon, turns: int) -> list[str]:
    """Send a note after each switch, without waiting for answers; the notes that went into a wrong conversation."""
    sent: dict[str, str] = {}
    before = ""
    for number in range(turns):
        place = f"conversation {number % 7}"
        daemon.tell("conversation_switched", conversation_id=place, previous_id=before, message_count=number)
        sent[daemon.command("add", {"note": f"{number} for {place}"})] = place
        before = place
    found = {id: daemon.answer(id, 120)["result"] for id in sent}
    return [f"{found[id]!r}, not {place!r}" for id, place in sent.items() if found[id] != place]


@embedded
async def test_each_note_goes_into_the_conversation_that_its_user_saw(store: Any) -> None:
    with Here(Noting(store.it)) as daemon:
        assert switch_and_note(daemon, TURNS) == []
        answered = [int(each["command_id"]) for each in daemon.of("response")]
        assert answered == sorted(answered), "in the order of the commands"
        noted = sum(len(notes) for notes in daemon.agent.notes.values())
        assert noted == TURNS


@pytest.mark.wide
@pytest.mark.only(api="blocking", warm="real", cold=("sqlite", "postgres"))
async def test_each_note_goes_there_on_servers_too(opener: Any) -> None:
    with Process(opener, "Noting") as daemon:
        assert switch_and_note(daemon, TURNS) == []
        daemon.hang_up()
        assert daemon.end() == 0


@embedded
async def test_a_note_goes_astray_if_its_command_runs_beside_the_switches(store: Any) -> None:
    """The negative control: commands in threads, as all of them once were."""

    class Beside(Noting):
        beside = True

    with Here(Beside(store.it)) as daemon:
        assert switch_and_note(daemon, 20) != []


class Waiting(Agent):
    """Commands and hooks that wait for one another."""

    def initialize(self) -> None:
        self.came = threading.Event()
        self.register_command("until_it_came", self.until_it_came)
        self.register_command("beside", self.until_it_came, async_enabled=True)
        self.register_command("let_come", self.came.set)
        self.register_command("delete", self.delete)

    def on_new_conversation(self, conversation_id: str) -> None:
        if conversation_id == "elsewhere":
            self.came.set()

    def on_conversation_deleted(self, conversation_id: str) -> None:
        self.log("INFO", "hook", hook="deleted", given=[conversation_id, self.conversation.get("city")])

    def until_it_came(self) -> bool:
        self.log("INFO", "waits")
        return self.came.wait(60)

    def delete(self) -> None:
        self.conversation.set("city", "Oslo")
        self.store.delete(self.conversation_id)


@embedded
async def test_the_hooks_of_other_replicas_run_while_a_command_waits(store: Any) -> None:
    with Here(Waiting(store.it)) as daemon:
        id = daemon.command("until_it_came")
        daemon.until("log", lambda data: data["message"] == "waits")
        store.it.session("elsewhere").create()
        assert daemon.answer(id)["result"] is True


@embedded
async def test_a_command_may_cause_hooks_and_wait_for_them(store: Any) -> None:
    with Here(Waiting(store.it)) as daemon:
        daemon.tell("new_conversation", conversation_id="c", is_clear=False)
        daemon.ask("delete")
        assert daemon.hooks() == [("deleted", "c", "Oslo")], "before the answer, and before the data was deleted"


@embedded
async def test_a_command_that_is_async_enabled_runs_beside_the_others(store: Any) -> None:
    with Here(Waiting(store.it)) as daemon:
        ids = [daemon.command("beside") for _ in range(3)]
        daemon.ask("let_come")
        assert [daemon.answer(id)["result"] for id in ids] == [True] * 3
        assert daemon.of("response")[0]["command_id"] not in ids
        registry = {each["name"]: each for each in daemon.of("command_registry")[-1]["commands"]}
        assert registry["beside"]["async"] is True
        assert "async" not in registry["let_come"]


@embedded
async def test_all_messages_are_handled_after_the_end_of_the_input(store: Any) -> None:
    class Brief(Noting):
        shutdown_timeout = 0.5  # for each message, not for all of them

    with Here(Brief(store.it)) as daemon:
        ids = []
        for number in range(100):
            daemon.tell("conversation_switched", conversation_id=f"c{number}", previous_id="", message_count=1)
            ids.append(daemon.command("add", {"note": "x"}))
        daemon.hang_up()
        assert [daemon.answer(id)["result"] for id in ids] == [f"c{number}" for number in range(100)]


@embedded
async def test_a_daemon_waits_while_too_much_of_what_it_sent_waits(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, most = 100_000, list[int]()
    full, written = threading.Event(), threading.Event()

    class Watched(wire.Busy):
        def add(self, count: int) -> None:
            super().add(count)
            most.append(self._count)

        def wait(self, seconds: float, *, below: int = 1) -> bool:
            found = super().wait(0, below=below) or (full.set() or super().wait(seconds, below=below))
            return bool(found)

    monkeypatch.setattr(bridge, "Busy", Watched)
    monkeypatch.setattr(bridge, "_WAITING", limit)
    with Here(Waiting(store.it)) as daemon:
        daemon.command("until_it_came")
        daemon.until("log", lambda data: data["message"] == "waits")

        def send() -> None:
            for _ in range(500):
                daemon.command("absent", {"text": "x" * 1000})
            written.set()

        sender = threading.Thread(target=send)
        sender.start()
        await until(lambda: full.is_set() or written.is_set())
        daemon.agent.came.set()
        sender.join(60)
        daemon.answer("501")
        assert max(most) < limit + 5000


@embedded
async def test_a_daemon_that_has_gone_is_noticed_while_too_much_waits(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Waiting):
        shutdown_timeout = 0.1

    monkeypatch.setattr(bridge, "_WAITING", 1)
    monkeypatch.setattr(bridge, "_LAST_MESSAGES", 0.1)
    monkeypatch.setattr(bridge, "_LOOK_EVERY", 0.05)
    agent = Hanging(store.it)
    with Here(agent) as daemon:  # at its end, the agent must have ended
        daemon.command("until_it_came")
        daemon.until("log", lambda data: data["message"] == "waits")
        for _ in range(3):
            daemon.command("until_it_came")
    agent.came.set()
