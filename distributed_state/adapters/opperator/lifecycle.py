"""What the daemon reports becomes events of the fleet. Law: one message is published once, and handled before the next.

The agent's hooks run from the fleet's events, here as on every other replica. So the daemon's next message is looked at
when the hooks for this one have run, as under the daemon's own SDK.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from distributed_state import Conflict, Deleted, NotFound
from distributed_state.adapters.opperator import wire

_HOOKS = 10.0  # seconds that hooks may hold up the daemon's next message


class Caller(Protocol):
    """Calls a method of the agent or its store from any thread, on whichever face these are."""

    def __call__(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call it with these arguments."""
        ...


class Publisher:
    """The conversations of one daemon's user, as the fleet hears of them."""

    def __init__(self, agent: Any, client: str, call: Caller) -> None:
        self._agent = agent
        self._client = client
        self._call = call
        self._handled: deque[dict[str, Any]] = deque(maxlen=1000)
        self._changed = threading.Condition()
        self._closed = False
        self.conversation_id = ""  # where the user is

    def publish(self, message: wire.Lifecycle) -> None:
        """Write what happened, and return once the agent's hooks have run."""
        with self._changed:
            self._handled.clear()
        if isinstance(message, wire.NewConversation):
            before = self._go_to(message.id)
            self._new(message, before)
        elif isinstance(message, wire.ConversationSwitched):
            self._go_to(message.id)
            self._switch(message.id, message.previous_id, message.message_count)
        elif isinstance(message, wire.ConversationDeleted):
            self._delete(message.id)
        elif isinstance(message, wire.AgentActivated):
            if message.conversation_id:
                self._go_to(message.conversation_id)
            self._agents(message.previous_agent, self._agent.name)
        elif isinstance(message, wire.AgentDeactivated):
            self._agents(self._agent.name, message.next_agent)
        else:
            self._emit("directory.changed", {"old_path": message.old_path, "new_path": message.new_path})

    def handled(self, event: dict[str, Any]) -> None:
        """The agent's hooks for this event have run. Called from the thread in which they ran."""
        with self._changed:
            self._handled.append(event)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for no hooks any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _go_to(self, id: str) -> str:
        """Note that the user is at another conversation, and return where they were."""
        before = self.conversation_id
        self.conversation_id = id
        self._agent.follow(self._client, id)
        return "" if before == id else before

    def _new(self, message: wire.NewConversation, previous_id: str) -> None:
        session = self._agent.store.session(message.id)
        while message.is_clear:
            try:
                if self._call(session.exists, fresh=True):
                    self._wait(self._call(session.clear, messages=True), "conversation.cleared", session)
                else:
                    self._wait(self._call(session.create, is_clear=True), "conversation.created", session)
                return
            except (Conflict, Deleted):
                """Another client created or deleted it in between: look again."""
        try:
            self._wait(self._call(session.create), "conversation.created", session)
        except Conflict:
            # The fleet knows it already: nothing is lost, and the user is there now.
            self._switch(message.id, previous_id, None)

    def _switch(self, id: str, previous_id: str, message_count: int | None) -> None:
        session = self._agent.store.session(id)
        place = {"previous_id": previous_id, "client": self._client, "message_count": message_count}
        try:
            version = self._call(session.switch, **place)
        except Deleted:
            # The daemon still has it, and its user goes on there.
            self._agent.log("WARNING", "a deleted conversation was created again", conversation=id)
            self._call(session.create)
            version = self._call(session.switch, **place)
        self._wait(version, "conversation.switched", session)

    def _delete(self, id: str) -> None:
        store = self._agent.store
        session = store.session(id)
        try:
            if self._call(session.exists, fresh=True):
                self._wait(self._call(store.delete, id), "conversation.deleted", session)
        except NotFound:
            """Another client deleted it in between."""
        if self.conversation_id == id:
            self._go_to("")

    def _agents(self, previous: str | None, following: str | None) -> None:
        # The daemon reports a switch to both agents, to each its half: `agent` says whose half this is.
        self._emit("agent.switched", {"previous_agent": previous, "next_agent": following, "agent": self._agent.name})

    def _emit(self, type: str, data: dict[str, Any]) -> None:
        place = {"client": self._client, "conversation_id": self.conversation_id}
        event = self._call(self._agent.store.emit, type, data | place, subject=f"client:{self._client}")
        self._wait_until(lambda seen: seen["id"] == event.id)

    def _wait(self, version: int, type: str, session: Any) -> None:
        self._wait_until(
            lambda seen: (seen["version"], seen["type"], seen["conversation_id"]) == (version, type, session.id)
        )

    def _wait_until(self, found: Callable[[dict[str, Any]], bool]) -> None:
        end = time.monotonic() + _HOOKS
        with self._changed:
            # After a resync, the events that were missed do not come any more.
            while not any(seen["type"] == "resync" or found(seen) for seen in self._handled):
                left = end - time.monotonic()
                if left <= 0 or self._agent.stopping or self._closed:
                    return
                self._changed.wait(min(left, 0.2))
