"""An agent under an Opperator daemon. Law: the daemon's messages are handled one after another, as they arrive.

The daemon's messages become events of the fleet: each message is published once, and the fleet's events run the agent's
hooks, here and on every other replica. The daemon's next message is handled after the hooks for this one have
run, and after a command has returned, as in the daemon's own SDK. *With commands in eight threads, a switch moved the
user on while a command ran, and its note went into the next conversation.* Only a command that is `async_enabled` runs
beside the messages that follow it.

A thread of its own handles the messages: the hooks' thread stays free for the events of other replicas and for the
hooks that a command itself causes, and signals and the end of the input are noticed while a command runs.
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
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

from distributed_state import (
    Agent,
    AsyncAgent,
    AsyncHost,
    CommandFailed,
    Conflict,
    Deleted,
    Host,
    InvalidValue,
    NotFound,
    StateError,
)
from distributed_state.adapters.opperator import wire
from distributed_state.adapters.opperator.wire import MAX_LINE, Busy, Incoming, Outgoing, standard_streams

log = logging.getLogger(__name__)
_BESIDE = 8  # `async_enabled` commands that run at a time, unless the agent says how many; the others wait
_DIRECTORY = 2.0  # seconds for the daemon to say where its user is
_LAST_LINES = 2.0  # seconds that the daemon gets to read the last lines
_LAST_ANSWERS = 0.5  # seconds for messages that were read, but not handled, to be answered
_LAST_MESSAGES = 20.0  # seconds that a message may take after the end of the input; or shutdown_timeout, if longer
_WAITING = MAX_LINE  # bytes of messages that are read ahead
_OVERHEAD = 1000  # bytes of memory for a message besides its text
_LOOK_EVERY = 1.0  # seconds between two checks whether the daemon has gone
_ARRIVES = 10.0  # seconds for an event to arrive while no hook runs or waits; it may have been lost with a server


def run(
    agent: Agent | AsyncAgent,
    stdin: BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    *,
    client: str = "",
) -> None:
    """Run an agent under an Opperator daemon, at the other end of `stdin` and `stdout`, until one of them ends.

    By default these are the process's own; other output is then redirected to standard error. `client` names the
    daemon's user in the events of the fleet; by default it is the agent's client, or user and host. It returns when
    `agent.run()` would (SIGTERM, SIGINT, the end of `main_loop`), and at the end of `stdin`, after all messages have
    been handled. A daemon sends SIGKILL three seconds after SIGTERM, so an agent with long commands needs a shorter
    `shutdown_timeout`; that of an OpperatorAgent is 2 seconds. SIGHUP and SIGUSR1 work, too. Errors of `agent.run()`
    are raised, and reported to the daemon.
    """
    if stdin is None or stdout is None:
        with standard_streams() as (source, target):
            Bridge(agent, stdin or source, stdout or target, client).run()
    else:
        Bridge(agent, stdin, stdout, client).run()


class Bridge:
    """One agent and its daemon: a thread each reads messages, handles them and writes lines."""

    def __init__(self, agent: Agent | AsyncAgent, stdin: BinaryIO, stdout: BinaryIO, client: str) -> None:
        self._agent: Any = agent
        # Everything is called on the context or the class: the author's own methods may have the same names.
        self._context = context = agent.agent_context
        self._display = context.display
        self._run_command: Any = AsyncAgent.run_command if isinstance(agent, AsyncAgent) else Agent.run_command
        self._client = client or context.client or f"opperator:{_user()}@{socket.gethostname()}"
        self._in = Incoming(stdin, self._too_long)
        self._out = Outgoing(stdout, context.stop)
        self._publisher = Publisher(agent, self._client, self._call)
        self._messages: queue.SimpleQueue[tuple[wire.Command | wire.Lifecycle, int] | None] = queue.SimpleQueue()
        self._beside: queue.SimpleQueue[tuple[wire.Command, str, int] | None] = queue.SimpleQueue()
        self._threads = getattr(agent, "max_async_workers", None) or _BESIDE
        self._busy = Busy()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = threading.Thread(target=self._listen, name="opperator in", daemon=True)

    def run(self) -> None:
        """Run the agent, and serve the daemon while it runs."""
        agent = self._agent
        self._context.follow(self._client, "")
        agent.invocation_directory = agent.invocation_directory or _directory()
        self._display.listeners.append(self._show)
        try:
            if isinstance(agent, AsyncAgent):
                asyncio.run(self._run())
            else:
                Host(agent).run()
        except Exception as error:
            self._out.send(wire.error(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._ended = True
            self._publisher.close()
            self._in.close()
            if self._reader.ident is not None:
                self._reader.join(_LAST_LINES)
            self._busy.wait(_LAST_ANSWERS)
            self._messages.put(None)
            for _ in range(self._threads):
                self._beside.put(None)
            self._display.listeners.remove(self._show)
            self._out.close(_LAST_LINES)
            if not self._reader.is_alive():
                self._in.free()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await AsyncHost(self._agent).run()

    def _call(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a method of the agent or its store, sync or asyncio, from a thread of the bridge."""
        if self._loop is None:
            return call(*args, **named)

        async def called() -> Any:
            found = call(*args, **named)
            return await found if inspect.isawaitable(found) else found

        work = called()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()  # the loop is closed, so the coroutine did not run
            raise

    # To the daemon

    def _show(self, kind: str, content: dict[str, Any]) -> None:
        """Send a change of the agent's display in the daemon's format. Called in the thread that made the change."""
        if kind == "event":
            self._publisher.handled(content)
        elif kind == "log":
            more = {"error": content["error"]} if "error" in content else {}
            line = wire.log(content["level"], content["message"], more | content["fields"])
            if dropped := self._out.send_log(line):
                text = "log lines were dropped, because the daemon reads slowly"
                self._out.send(wire.log("warning", text, {"dropped": dropped}))
        elif kind == "started":
            self._out.send(wire.command_registry(self._display.visible["commands"]))
            self._out.send(wire.ready(os.getpid(), str(getattr(self._agent, "version", ""))))
            self._begin()
            if self._out.broken:
                self._context.stop()  # the pipe broke before the agent could be stopped
        elif kind in _SHOWN:
            self._out.send(_SHOWN[kind](content))

    def _begin(self) -> None:
        self._reader.start()
        threading.Thread(target=self._handle_all, name="opperator", daemon=True).start()
        for number in range(self._threads):
            threading.Thread(target=self._work, name=f"opperator command {number}", daemon=True).start()

    # From the daemon

    def _listen(self) -> None:
        for line in self._in:
            # A command may take long: the daemon then waits as soon as its pipe is full. If it has gone, the rest of
            # the pipe is read, so that its end is noticed.
            while not (self._busy.wait(_LOOK_EVERY, below=_WAITING) or self._ended or self._in.hung_up):
                pass
            if self._ended:
                return
            try:
                message = wire.read(line)
            except InvalidValue as error:
                self._ignored(error)
                continue
            size = len(line) + _OVERHEAD
            self._busy.add(size)
            self._messages.put((message, size))
        if not self._ended:
            self._finish()

    def _handle_all(self) -> None:
        while given := self._messages.get():
            message, size = given
            try:
                self._handle(message, size)
            except InvalidValue as error:
                self._ignored(error)
            except Exception as error:  # noqa: BLE001 - the next message may be valid
                text = f"{type(error).__name__}: {error}"
                self._display.log("ERROR", "a message from the daemon could not be published", {"error": text})
            finally:
                self._busy.add(-size)

    def _handle(self, message: wire.Command | wire.Lifecycle, size: int) -> None:
        if not isinstance(message, wire.Command):
            if not self._ended:
                with self._context.open_store.acting_as(self._client):
                    self._publisher.publish(message)
        elif message.name == wire.LIST_COMMANDS:
            commands = wire.definitions(self._display.visible["commands"])
            self._out.send(wire.succeeded(message.id, commands))
        elif self._is_async(message.name):
            self._busy.add(size)
            self._beside.put((message, self._publisher.conversation_id, size))
        else:
            self._out.send(self._answer(message, self._publisher.conversation_id))

    def _ignored(self, error: InvalidValue) -> None:
        self._display.log("WARNING", "ignored a message from the daemon", {"error": str(error)})

    # Commands

    def _is_async(self, name: str) -> bool:
        return any(each["name"] == name and "async_enabled" in each for each in self._display.visible["commands"])

    def _work(self) -> None:
        while given := self._beside.get():
            command, conversation_id, size = given
            try:
                self._out.send(self._answer(command, conversation_id))
            finally:
                self._busy.add(-size)

    def _answer(self, command: wire.Command, conversation_id: str) -> bytes:
        if self._ended:
            return wire.failed(command.id, f"{command.name}: the agent {self._context.name} is ending")
        try:
            result = self._call(
                self._run_command,
                self._agent,
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
                log.error("agent %s: command %s failed", self._context.name, command.name, exc_info=error)
            return wire.failed(command.id, text or type(error).__name__)

    # The end

    def _finish(self) -> None:
        """Stop after the daemon has closed its end, once all its messages have been handled."""
        handled = -1
        while not self._busy.wait(max(self._agent.shutdown_timeout, _LAST_MESSAGES)):
            if handled == self._busy.done:  # one message takes longer than that
                self._context.stop()  # again below: the second call does not wait
                break
            handled = self._busy.done
        self._context.stop()

    def _too_long(self, size: int) -> None:
        self._display.log(
            "WARNING", "ignored a line from the daemon that is too long", {"bytes": size, "limit": MAX_LINE}
        )


_SHOWN: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "commands": lambda content: wire.command_registry(content["commands"]),
    "description": lambda content: wire.agent_description(content["description"]),
    "system_prompt": lambda content: wire.system_prompt(content["system_prompt"], content["replace"]),
    "section": lambda content: wire.sidebar_section(**content),
    "section_removed": lambda content: wire.sidebar_section_removal(content["id"]),
}


def _directory() -> str:
    """The folder that the daemon's user works from; "" if it does not say."""
    try:
        found = wire.ask(_DIRECTORY, type="get_invocation_dir").get("invocation_dir")
    except (OSError, ValueError, AttributeError):  # no daemon, or no sockets of this kind
        return ""
    return found if isinstance(found, str) else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())


class Caller(Protocol):
    """Calls a method of the agent or its store, sync or asyncio, from any thread."""

    def __call__(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call the method with these arguments."""
        ...


class Publisher:
    """Publishes the conversations of one daemon's user to the fleet."""

    def __init__(self, agent: Any, client: str, call: Caller) -> None:
        self._agent = agent
        self._context = agent.agent_context
        self._client = client
        self._call = call
        self._handled: deque[dict[str, Any]] = deque(maxlen=1000)
        self._changed = threading.Condition()
        self._closed = False
        self.conversation_id = ""  # where the user is

    def publish(self, message: wire.Lifecycle) -> None:
        """Publish a message of the daemon, and return once the agent's hooks have run."""
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
                self._begin(message.conversation_id)
            self._agents(message.previous_agent, self._context.name)
        elif isinstance(message, wire.AgentDeactivated):
            self._agents(self._context.name, message.next_agent)
        else:
            self._emit("directory.changed", {"old_path": message.old_path, "new_path": message.new_path})

    def handled(self, event: dict[str, Any]) -> None:
        """Note that the agent's hooks for this event have run. Called from the thread in which they ran."""
        with self._changed:
            self._handled.append(event)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting for hooks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _go_to(self, id: str) -> str:
        """Note that the user switched to another conversation, and return the previous one."""
        before = self.conversation_id
        self.conversation_id = id
        self._context.follow(self._client, id)
        return "" if before == id else before

    def _new(self, message: wire.NewConversation, previous_id: str) -> None:
        session = self._context.open_store.session(message.id)
        while message.is_clear:
            try:
                if self._call(session.exists, fresh=True):
                    self._wait(self._call(session.clear, messages=True), "conversation.cleared", session)
                else:
                    self._wait(self._call(session.create, is_clear=True), "conversation.created", session)
                return
            except (Conflict, Deleted):
                """Another client created or deleted it in between: read it again."""
        try:
            self._wait(self._call(session.create), "conversation.created", session)
        except Conflict:
            # The conversation already exists in the fleet: keep its data, and switch the user to it.
            self._switch(message.id, previous_id, None)

    def _begin(self, id: str) -> None:
        """Create a conversation that only the daemon knows, so that its hooks run before those that follow."""
        session = self._context.open_store.session(id)
        if self._agent.conversation_defaults and not self._call(session.exists, fresh=True):
            with suppress(Conflict):  # another client created it in between
                self._wait(self._call(session.create), "conversation.created", session)

    def _switch(self, id: str, previous_id: str, message_count: int | None) -> None:
        session = self._context.open_store.session(id)
        place = {"previous_id": previous_id, "client": self._client, "message_count": message_count}
        try:
            version = self._call(session.switch, **place)
        except Deleted:
            # The daemon still has it, and its user continues there.
            self._context.display.log("WARNING", "a deleted conversation was created again", {"conversation": id})
            self._call(session.create)
            version = self._call(session.switch, **place)
        self._wait(version, "conversation.switched", session)

    def _delete(self, id: str) -> None:
        store = self._context.open_store
        session = store.session(id)
        try:
            if self._call(session.exists, fresh=True):
                self._wait(self._call(store.delete, id), "conversation.deleted", session)
        except NotFound:
            """Another client deleted it in between."""
        if self.conversation_id == id:
            self._go_to("")

    def _agents(self, previous: str | None, following: str | None) -> None:
        # The daemon reports a switch to both agents, to each its own half: `agent` names the agent of this half.
        self._emit("agent.switched", {"previous_agent": previous, "next_agent": following, "agent": self._context.name})

    def _emit(self, type: str, data: dict[str, Any]) -> None:
        place = {"client": self._client, "conversation_id": self.conversation_id}
        event = self._call(self._context.open_store.emit, type, data | place, subject=f"client:{self._client}")
        self._wait_until(lambda seen: seen["id"] == event.id)

    def _wait(self, version: int, type: str, session: Any) -> None:
        self._wait_until(
            lambda seen: (seen["version"], seen["type"], seen["conversation_id"]) == (version, type, session.id)
        )

    def _wait_until(self, found: Callable[[dict[str, Any]], bool]) -> None:
        since = time.monotonic()
        with self._changed:
            # After a resync, missed events never arrive.
            while not any(seen["type"] == "resync" or found(seen) for seen in self._handled):
                host = self._context.host
                if host is not None and host.working:
                    since = time.monotonic()
                if self._closed or self._context.stopping or time.monotonic() - since >= _ARRIVES:
                    return
                self._changed.wait(0.2)
