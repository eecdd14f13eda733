"""An agent under an Opperator daemon. Law: the daemon's messages are taken in order; commands run beside them."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from distributed_state import Agent, AsyncAgent, CommandFailed, InvalidValue, StateError
from distributed_state.adapters.opperator import wire
from distributed_state.adapters.opperator.lifecycle import Publisher
from distributed_state.adapters.opperator.pipes import MAX_LINE, Busy, Incoming, Outgoing, standard_streams

log = logging.getLogger(__name__)
_COMMANDS = 8  # that run at a time; the others wait
_LAST_LINES = 2.0  # seconds that the daemon gets to read the last lines


def run(
    agent: Agent | AsyncAgent,
    stdin: BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    *,
    client: str = "",
) -> None:
    """Run an agent under an Opperator daemon, which is at the other end of `stdin` and `stdout`, until either ends.

    By default these are the process's own; then everything else that is printed goes to standard error. `client` names
    the daemon's user in the events of the fleet; by default it is the agent's client, or user and host. It returns as
    `agent.run()` does (SIGTERM, SIGINT, the end of `main_loop`), and at the end of `stdin`, once every message before
    that is done. A daemon sends SIGKILL three seconds after SIGTERM, so an agent with long commands needs a shorter
    `shutdown_timeout`. SIGHUP and SIGUSR1 work, too. Raises what `agent.run()` raises; the daemon gets it, too.
    """
    if stdin is None or stdout is None:
        with standard_streams() as (source, target):
            Bridge(agent, stdin or source, stdout or target, client).run()
    else:
        Bridge(agent, stdin, stdout, client).run()


class Bridge:
    """One agent and its daemon: a thread reads messages, one writes lines, and some run commands."""

    def __init__(self, agent: Agent | AsyncAgent, stdin: BinaryIO, stdout: BinaryIO, client: str) -> None:
        self._agent: Any = agent
        self._client = client or agent.client or f"opperator:{_user()}@{socket.gethostname()}"
        self._in = Incoming(stdin, self._too_long)
        self._out = Outgoing(stdout, self._daemon_gone)
        self._publisher = Publisher(agent, self._client, self._call)
        self._commands: queue.SimpleQueue[tuple[wire.Command, str] | None] = queue.SimpleQueue()
        self._busy = Busy()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = threading.Thread(target=self._listen, name="opperator in", daemon=True)

    def run(self) -> None:
        """Run the agent, and serve the daemon while it runs."""
        agent = self._agent
        agent.follow(self._client)
        agent.listeners.append(self._show)
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
            self._publisher.close()
            self._in.close()
            if self._reader.ident is not None:
                self._reader.join(_LAST_LINES)
            self._busy.wait(_LAST_LINES)
            for _ in range(_COMMANDS):
                self._commands.put(None)
            agent.listeners.remove(self._show)
            self._out.close(_LAST_LINES)
            if not self._reader.is_alive():
                self._in.free()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._agent.run()

    def _call(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a method of the agent's store, from a thread of ours, on whichever face it is."""
        if self._loop is None:
            return call(*args, **named)

        async def called() -> Any:
            found = call(*args, **named)
            return await found if inspect.isawaitable(found) else found

        work = called()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError:
            work.close()  # the loop is closed, and it never ran
            raise

    # To the daemon

    def _show(self, kind: str, content: dict[str, Any]) -> None:
        """Send what the agent shows in the daemon's format. Called in whichever thread it happens."""
        if kind == "event":
            self._publisher.handled(content)
        elif kind == "log":
            more = {"error": content["error"]} if "error" in content else {}
            line = wire.log(content["level"], content["message"], more | content["fields"])
            if dropped := self._out.send_log(line):
                text = "log lines were dropped: the daemon reads slowly"
                self._out.send(wire.log("warning", text, {"dropped": dropped}))
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
                message = wire.read(line)
                with self._agent.store.acting_as(self._client):
                    self._receive(message)
            except InvalidValue as error:
                self._agent.log("WARNING", "ignored a message from the daemon", error=str(error))
            except Exception as error:  # noqa: BLE001 - the next message may be a good one
                text = f"{type(error).__name__}: {error}"
                self._agent.log("ERROR", "a message from the daemon could not be published", error=text)
        if not self._ended:
            self._finish()

    def _receive(self, message: wire.Command | wire.Lifecycle) -> None:
        if not isinstance(message, wire.Command):
            self._publisher.publish(message)
        elif message.name == wire.LIST_COMMANDS:
            commands = wire.definitions(self._agent.visible["commands"])
            self._out.send(wire.succeeded(message.id, commands))
        else:
            self._busy.add(1)
            self._commands.put((message, self._publisher.conversation_id))

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
            result = self._call(
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
        """The daemon has closed its end: stop once everything it sent is done."""
        if not self._busy.wait(self._agent.shutdown_timeout):
            self._agent.stop()  # again below: the second call does not wait
        self._agent.stop()

    def _daemon_gone(self) -> None:
        self._agent.stop()

    def _too_long(self, size: int) -> None:
        self._agent.log("WARNING", "ignored a line from the daemon that is too long", bytes=size, limit=MAX_LINE)


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
