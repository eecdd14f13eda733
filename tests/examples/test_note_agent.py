"""An agent that takes notes for each conversation, run by several replicas: a note taken on one is listed by all.

Nothing is loaded or saved: each note is a commit, a new conversation has its defaults before the hook runs, and what is
deleted is gone everywhere.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from below import keys_of, redis_of, until
from sync_api import core

from distributed_state import Agent, CommandArgument, InvalidValue, LogLevel

pytestmark = [pytest.mark.replicas, pytest.mark.only(api="blocking")]


class NoteAgent(Agent):
    """Keeps the notes of each conversation."""

    name = "note_agent"
    persistent_defaults = {"notes_ever": 0}  # noqa: RUF012 - as a user writes it

    def conversation_defaults(self) -> dict[str, Any]:
        return {"notes": [], "created": time.time()}

    def initialize(self) -> None:
        self.started = time.monotonic()
        self.set_description("Takes notes and lists them")
        self.register_command(
            "add_note",
            self.add_note,
            description="Note something down in this conversation",
            arguments=[CommandArgument("note", "string", "What to note", required=True)],
        )
        self.register_command("list_notes", self.list_notes, description="List the notes of this conversation")
        self.register_section("status", "Notes", "starting")

    def start(self) -> None:
        self.update_section("status", "ready")

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        self.show()

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        self.show()

    def on_conversation_deleted(self, conversation_id: str) -> None:
        last = self.conversation.get("notes", [])
        self.log(LogLevel.INFO, "conversation deleted", conversation=conversation_id, notes=len(last))

    def on_status(self) -> None:
        self.log(
            LogLevel.INFO,
            "notes",
            uptime_seconds=int(time.monotonic() - self.started),
            notes_ever=self.persistent.get("notes_ever"),
            conversation=self.conversation_id,
        )

    def add_note(self, args: dict[str, Any]) -> dict[str, Any]:
        if self.conversation is None:
            return {"error": "there is no conversation yet"}
        self.conversation.append_to("notes", {"text": args["note"], "time": time.time()})
        self.persistent.increment("notes_ever")
        self.show()
        return {"added": args["note"], "total": len(self.conversation.get("notes"))}

    def list_notes(self) -> dict[str, Any]:
        notes = [] if self.conversation is None else self.conversation.get("notes", [])
        return {"notes": [note["text"] for note in notes]}

    def show(self) -> None:
        notes = self.conversation.get("notes", [])
        self.update_section("status", f"{self.conversation_id[:8]}: {len(notes)} notes")


async def test_notes_are_shared_by_all_replicas_and_survive_them(opener: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    here, there = (await opener()).it, (await opener()).it
    with NoteAgent(here) as first, NoteAgent(there) as second:
        assert first.run_command("list_notes") == {"notes": []}
        assert first.run_command("add_note", {"note": "lost"}) == {"error": "there is no conversation yet"}
        with pytest.raises(InvalidValue, match="'note' is missing"):
            first.run_command("add_note")

        here.session("monday").create()
        for agent in (first, second):
            await until(lambda agent=agent: agent.visible["sections"]["status"]["content"] == "monday: 0 notes")
        assert first.run_command("add_note", {"note": "buy milk"}) == {"added": "buy milk", "total": 1}
        assert second.run_command("add_note", {"note": "call home"}) == {"added": "call home", "total": 2}
        assert second.run_command("list_notes") == {"notes": ["buy milk", "call home"]}

        here.session("tuesday").switch(previous_id="monday")
        await until(lambda: second.conversation_id == "tuesday")
        assert second.run_command("list_notes", conversation_id="tuesday") == {"notes": []}
        assert second.run_command("list_notes", conversation_id="monday") == {"notes": ["buy milk", "call home"]}

    with NoteAgent((await opener()).it) as again:
        """Another process, later."""
        here.session("monday").switch(previous_id="tuesday")
        await until(lambda: again.visible["sections"]["status"]["content"] == "monday: 2 notes")
        assert again.run_command("list_notes") == {"notes": ["buy milk", "call home"]}
        again.status()
        assert [r.fields["notes_ever"] for r in caplog.records if r.getMessage().startswith("notes ")] == [2]

        here.session("monday").clear()
        await until(lambda: again.visible["sections"]["status"]["content"] == "monday: 0 notes")
        assert again.run_command("add_note", {"note": "start over"})["total"] == 1

        here.delete("monday")
        await until(lambda: again.conversation is None)
        deleted = [r.fields for r in caplog.records if r.getMessage().startswith("conversation deleted")]
        assert deleted == [{"conversation": "monday", "notes": 1}], "the last state could be read, though it was gone"
        assert again.run_command("list_notes") == {"notes": []}


async def test_notes_that_cannot_be_read_do_not_stop_the_agent(opener: Any, caplog: Any) -> None:
    store = await opener()
    with NoteAgent(store.it) as agent:
        store.it.session("c").switch()
        await until(lambda: agent.conversation_id == "c")
        agent.run_command("add_note", {"note": "x"})
        with redis_of(store) as client:
            client.hset(keys_of(store, "c").record, "notes", b"[{torn")
        core(store).invalidate()
        assert agent.run_command("list_notes") == {"notes": []}
        assert [r.levelname for r in caplog.records if "cannot be read" in r.getMessage()] == ["WARNING"]
