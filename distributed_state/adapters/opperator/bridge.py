"""An agent of ours under an Opperator daemon. Law: what the daemon says is told to the fleet once.

The agent's hooks run from the fleet's events, here as on every other replica. The daemon's messages are taken in order:
one is told to the fleet, and its hooks have run here, before the next is looked at; commands run beside that.
"""

from __future__ import annotations

import asyncio
import getpass
import inspect
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from distributed_state import Agent, AsyncAgent, CommandFailed, Conflict, Deleted, InvalidValue, NotFound, StateError
from distributed_state.adapters.opperator import wire
from distributed_state.adapters.opperator.pipes import MAX_LINE, Busy, Incoming, Outgoing, standard_streams

log = logging.getLogger(__name__)
_COMMANDS = 8  # that run at a time; the others wait
_HOOKS = 10.0  # seconds that hooks may hold up what the daemon says next
_LAST_LINES = 2.0  # seconds that the daemon gets to read what it was told last


def run(
    agent: Agent | AsyncAgent,
    stdin: BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    *,
    client: str = "",
) -> None:
    """Run an agent under an Opperator daemon, which speaks through `stdin` and `stdout`, until one of both ends it.

    Without files, those of the process: what else is printed goes to standard error then. `client` names the daemon's
    user in the events of the fleet; by default the agent's client, or user and host. It ends as `agent.run()` does
    (SIGTERM, SIGINT, the end of `main_loop`), and with the end of `stdin`, when everything said before is done; a
    daemon kills three seconds after SIGTERM, so an agent with long commands wants a shorter `shutdown_timeout`. SIGHUP
    and SIGUSR1 work, too. Raises what `agent.run()` raises, after the daemon was told.
    """
    if stdin is None or stdout is None:
        with standard_streams() as (source, target):
            Bridge(agent, stdin or source, stdout or target, client).run()
    else:
        Bridge(agent, stdin, stdout, client).run()


class Bridge:
    """One agent and its daemon."""

    def __init__(self, agent: Agent | AsyncAgent, stdin: BinaryIO, stdout: BinaryIO, client: str) -> None:
        self._agent: Any = agent
        self._client = client or agent.client or f"opperator:{_user()}@{socket.gethostname()}"
        self._current = ""
        self._in = Incoming(stdin, self._too_long)
        self._out = Outgoing(stdout, self._daemon_gone)
        self._handled: deque[dict[str, Any]] = deque(maxlen=1000)
        self._heard = threading.Condition()
        self._commands: queue.SimpleQueue[tuple[wire.Command, str] | None] = queue.SimpleQueue()
        self._busy = Busy()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = threading.Thread(target=self._listen, name="opperator in", daemon=True)

    def run(self) -> None:
        """Run the agent, and the wire while it runs."""
        agent = self._agent
        agent.follow(self._client)
        agent.listeners.append(self._tell)
        try:
            if isinstance(agent, AsyncAgent):
                asyncio.run(self._run())
            else:
                agent.run()
        except Exception as error:
            self._out.send(wire.error(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._ended = True
            self._in.close()
            if self._reader.ident is not None:
                self._reader.join(_LAST_LINES)
            self._busy.wait(_LAST_LINES)
            for _ in range(_COMMANDS):
                self._commands.put(None)
            agent.listeners.remove(self._tell)
            self._out.close(_LAST_LINES)
            if not self._reader.is_alive():
                self._in.free()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._agent.run()

    def _ask(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a method of the agent's store, from a thread of ours, on whichever face it is."""
        if self._loop is None:
            return call(*args, **named)

        async def asked() -> Any:
            found = call(*args, **named)
            return await found if inspect.isawaitable(found) else found

        work = asked()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()  # the loop is closed, and it never ran
            raise

    # To the daemon

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        """What the agent shows, in the daemon's words. Called in whichever thread it happens."""
        if kind == "event":
            with self._heard:
                self._handled.append(content)
                self._heard.notify_all()
        elif kind == "log":
            more = {"error": content["error"]} if "error" in content else {}
            line = wire.log(content["level"], content["message"], more | content["fields"])
            if lost := self._out.send_log(line):
                self._out.send(
                    wire.log("warning", "lines of the log are lost: the daemon reads slowly", {"lost": lost})
                )
        elif kind == "started":
            self._out.send(wire.command_registry(self._agent.visible["commands"]))
            self._out.send(wire.ready(os.getpid(), str(getattr(self._agent, "version", ""))))
            self._begin()
            if self._out.broken:
                self._agent.stop()  # it was gone before the agent could be stopped
        elif kind in _SHOWN:
            self._out.send(_SHOWN[kind](content))

    def _begin(self) -> None:
        self._reader.start()
        for number in range(_COMMANDS):
            threading.Thread(target=self._work, name=f"opperator command {number}", daemon=True).start()

    # From the daemon

    def _listen(self) -> None:
        for line in self._in:
            if self._ended:
                return
            try:
                said = wire.read(line)
                with self._agent.store.acting_as(self._client):
                    self._take(said)
            except InvalidValue as error:
                self._agent.log("WARNING", "passed over what the daemon said", error=str(error))
            except Exception as error:  # noqa: BLE001 - the next message is nobody's fault
                text = f"{type(error).__name__}: {error}"
                self._agent.log("ERROR", "what the daemon said could not be told to the fleet", error=text)
        if not self._ended:
            self._finish()

    def _take(self, said: wire.Command | wire.Lifecycle) -> None:
        with self._heard:
            self._handled.clear()
        if isinstance(said, wire.Command):
            if said.name == wire.LIST_COMMANDS:
                commands = wire.definitions(self._agent.visible["commands"])
                self._out.send(wire.succeeded(said.id, commands))
            else:
                self._busy.add(1)
                self._commands.put((said, self._current))
        elif isinstance(said, wire.NewConversation):
            before = self._go_to(said.id)
            self._new(said, before)
        elif isinstance(said, wire.ConversationSwitched):
            self._go_to(said.id)
            self._switch(said.id, said.previous_id, said.message_count)
        elif isinstance(said, wire.ConversationDeleted):
            self._delete(said.id)
        elif isinstance(said, wire.AgentActivated):
            if said.conversation_id:
                self._go_to(said.conversation_id)
            self._emit(
                "agent.switched",
                {"previous_agent": said.previous_agent, "next_agent": self._agent.name, "agent": self._agent.name},
            )
        elif isinstance(said, wire.AgentDeactivated):
            self._emit(
                "agent.switched",
                {"previous_agent": self._agent.name, "next_agent": said.next_agent, "agent": self._agent.name},
            )
        else:
            self._emit("directory.changed", {"old_path": said.old_path, "new_path": said.new_path})

    def _go_to(self, id: str) -> str:
        """Let the daemon's user be at another conversation; where it was."""
        before = self._current
        self._current = id
        self._agent.follow(self._client, id)
        return "" if before == id else before

    def _new(self, said: wire.NewConversation, previous_id: str) -> None:
        session = self._agent.store.session(said.id)
        while said.is_clear:
            try:
                if self._ask(session.exists, fresh=True):
                    self._wait(self._ask(session.clear, messages=True), "conversation.cleared", session)
                else:
                    self._wait(self._ask(session.create, is_clear=True), "conversation.created", session)
                return
            except (Conflict, Deleted):
                """Just now, by somebody else: looked at again."""
        try:
            self._wait(self._ask(session.create), "conversation.created", session)
        except Conflict:
            # Known to the fleet: nothing is lost, and the user is there now.
            self._switch(said.id, previous_id, None)

    def _switch(self, id: str, previous_id: str, message_count: int | None) -> None:
        session = self._agent.store.session(id)
        place = {"previous_id": previous_id, "client": self._client, "message_count": message_count}
        try:
            version = self._ask(session.switch, **place)
        except Deleted:
            # The daemon still has it, and its user goes on there.
            self._agent.log("WARNING", "a conversation that was deleted begins anew", conversation=id)
            self._ask(session.create)
            version = self._ask(session.switch, **place)
        self._wait(version, "conversation.switched", session)

    def _delete(self, id: str) -> None:
        store = self._agent.store
        session = store.session(id)
        try:
            if self._ask(session.exists, fresh=True):
                self._wait(self._ask(store.delete, id), "conversation.deleted", session)
        except NotFound:
            """Just now, by somebody else."""
        if self._current == id:
            self._go_to("")

    def _emit(self, type: str, data: dict[str, Any]) -> None:
        # Of a switch between two agents the daemon tells each its half: `agent` says whose this is.
        place = {"client": self._client, "conversation_id": self._current}
        event = self._ask(self._agent.store.emit, type, data | place, subject=f"client:{self._client}")
        self._wait_until(lambda told: told["id"] == event.id)

    def _wait(self, version: int, type: str, session: Any) -> None:
        self._wait_until(
            lambda told: (told["version"], told["type"], told["conversation_id"]) == (version, type, session.id)
        )

    def _wait_until(self, handled: Callable[[dict[str, Any]], bool]) -> None:
        """Let the hooks for an event run before the daemon's next message is looked at, as under its own SDK."""
        end = time.monotonic() + _HOOKS
        with self._heard:
            # After a resync, what was missed does not come any more.
            while not any(told["type"] == "resync" or handled(told) for told in self._handled):
                left = end - time.monotonic()
                if left <= 0 or self._agent.stopping or self._ended:
                    return
                self._heard.wait(min(left, 0.2))

    # Commands

    def _work(self) -> None:
        while given := self._commands.get():
            try:
                self._out.send(self._answer(*given))
            finally:
                self._busy.add(-1)

    def _answer(self, command: wire.Command, conversation_id: str) -> bytes:
        if self._ended:
            return wire.failed(command.id, f"{command.name}: the agent {self._agent.name} is ending")
        try:
            result = self._ask(
                self._agent.run_command,
                command.name,
                command.args,
                conversation_id=conversation_id,
                directory=command.directory,
                progress=lambda text, fields: self._out.send(wire.progress(command.id, text, fields)),
            )
            return wire.succeeded(command.id, result)
        except BaseException as error:
            text = str(error) if isinstance(error, StateError) else f"{command.name}: {type(error).__name__}: {error}"
            raised = error.__cause__ if isinstance(error, CommandFailed) else error
            if raised is not None and not isinstance(raised, StateError):
                log.error("agent %s: command %s failed", self._agent.name, command.name, exc_info=error)
            return wire.failed(command.id, text or type(error).__name__)

    # The end

    def _finish(self) -> None:
        """No more is to come: end when what came is done."""
        if not self._busy.wait(self._agent.shutdown_timeout):
            self._agent.stop()  # a second time, below: without waiting again
        self._agent.stop()

    def _daemon_gone(self) -> None:
        self._agent.stop()

    def _too_long(self, size: int) -> None:
        self._agent.log("WARNING", "passed over a line of the daemon that is too long", bytes=size, limit=MAX_LINE)


_SHOWN: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "commands": lambda content: wire.command_registry(content["commands"]),
    "description": lambda content: wire.agent_description(content["description"]),
    "system_prompt": lambda content: wire.system_prompt(content["system_prompt"]),
    "section": lambda content: wire.sidebar_section(**content),
    "section_removed": lambda content: wire.sidebar_section_removal(content["id"]),
}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())
