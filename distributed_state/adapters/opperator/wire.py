"""The messages between an Opperator daemon and an agent's process, and the pipes that carry them.

Law: message shapes are defined only here; a writer never waits for the reader, and a bad line does not block the next.
A line is a JSON object {"type", "timestamp", "data"}. From the daemon:

    command           {command, args?, id?, working_dir?}; `__list_commands` asks for the registry
    lifecycle_event   {event_type, data}:
        new_conversation              {conversation_id, is_clear}
        conversation_switched         {conversation_id, previous_id, message_count}
        conversation_deleted          {conversation_id}
        agent_activated               {previous_agent, conversation_id}
        agent_deactivated             {next_agent}
        invocation_directory_changed  {old_path, new_path}

To the daemon: the functions from `ready` to `error`, one for each type. Source: the daemon's `internal/protocol` and
its Python SDK, https://github.com/opper-ai/opperator.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from distributed_state import InvalidValue

LIST_COMMANDS = "__list_commands"
MAX_LINE = 16 * 2**20
_CHUNK = 2**16
_WAITING_LOGS = 1000
_LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "critical": "fatal"}


@dataclass(frozen=True, slots=True)
class Command:
    """The daemon's request to run a command. `args` is unchecked: the agent checks it."""

    name: str
    args: Any
    id: str
    directory: str


@dataclass(frozen=True, slots=True)
class NewConversation:
    """A conversation was created, or emptied with /clear."""

    id: str
    is_clear: bool


@dataclass(frozen=True, slots=True)
class ConversationSwitched:
    """The user switched to a conversation; the daemon counted its messages."""

    id: str
    previous_id: str
    message_count: int


@dataclass(frozen=True, slots=True)
class ConversationDeleted:
    """A conversation is about to be deleted by the daemon."""

    id: str


@dataclass(frozen=True, slots=True)
class AgentActivated:
    """The user chose this agent."""

    previous_agent: str | None
    conversation_id: str


@dataclass(frozen=True, slots=True)
class AgentDeactivated:
    """The user left this agent."""

    next_agent: str | None


@dataclass(frozen=True, slots=True)
class DirectoryChanged:
    """The user changed to another folder."""

    old_path: str
    new_path: str


Lifecycle = (
    NewConversation | ConversationSwitched | ConversationDeleted | AgentActivated | AgentDeactivated | DirectoryChanged
)


def read(line: bytes) -> Command | Lifecycle:
    """Parse a message of the daemon. Raises InvalidValue if it is malformed or of an unknown type."""
    try:
        message = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        said = getattr(error, "msg", type(error).__name__)
        raise InvalidValue(f"a line of {len(line)} bytes is not JSON: {said}") from None
    if not isinstance(message, dict):
        raise InvalidValue(f"a line holds a {type(message).__name__}, not an object")
    kind = message.get("type")
    data = message.get("data")
    if kind not in ("command", "lifecycle_event"):
        raise InvalidValue(f"a message of the unknown type {kind!r:.80}")
    if not isinstance(data, dict):
        raise InvalidValue(f"{kind}: data is an object, not a {type(data).__name__}")
    if kind == "command":
        # Errors in a command are reported in the answer to its id, so only the id is checked here.
        name, directory = (
            value if isinstance(value := data.get(key), str) else "" for key in ("command", "working_dir")
        )
        return Command(name, data.get("args"), _text(data, "id"), directory)
    event = data.get("event_type")
    inner = data.get("data")
    reader = _LIFECYCLE.get(event) if isinstance(event, str) else None
    if reader is None:
        raise InvalidValue(f"a lifecycle event of the unknown type {event!r:.80}")
    if not isinstance(inner, dict):
        raise InvalidValue(f"{event}: data is an object, not a {type(inner).__name__}")
    try:
        return reader(inner)
    except InvalidValue as error:
        raise InvalidValue(f"{event}: {error}") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _text(data: Mapping[str, Any], name: str, *, needed: bool = False) -> str:
    value = data.get(name)
    value = "" if value is None else value
    if not isinstance(value, str) or (needed and not value):
        raise InvalidValue(f"{name} is a {'non-empty ' * needed}text, not {value!r:.80}")
    return value


def _name(data: Mapping[str, Any], name: str) -> str | None:
    """An agent's name, which may be "" or null."""
    return None if data.get(name) is None else _text(data, name)


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    return max(0, value) if type(value) is int else 0


_LIFECYCLE: dict[str, Callable[[Mapping[str, Any]], Lifecycle]] = {
    "new_conversation": lambda data: NewConversation(
        _text(data, "conversation_id", needed=True), data.get("is_clear") is True
    ),
    "conversation_switched": lambda data: ConversationSwitched(
        _text(data, "conversation_id", needed=True), _text(data, "previous_id"), _count(data, "message_count")
    ),
    "conversation_deleted": lambda data: ConversationDeleted(_text(data, "conversation_id", needed=True)),
    "agent_activated": lambda data: AgentActivated(_name(data, "previous_agent"), _text(data, "conversation_id")),
    "agent_deactivated": lambda data: AgentDeactivated(_name(data, "next_agent")),
    "invocation_directory_changed": lambda data: DirectoryChanged(
        _text(data, "old_path"), _text(data, "new_path", needed=True)
    ),
}


# To the daemon. Empty values are left out, as in the daemon's SDK.


def ready(pid: int, version: str = "") -> bytes:
    """The agent has started and reads messages."""
    return _line("ready", {"pid": pid, **_given(version=version)})


def log(level: str, message: str, fields: Mapping[str, Any]) -> bytes:
    """A line for the daemon's log. Levels are debug, info, warning, error and fatal."""
    return _line("log", {"level": _LEVELS.get(level, "info"), "message": message, **_given(fields=dict(fields))})


def succeeded(id: str, result: Any) -> bytes:
    """The answer to a command."""
    more = {} if result is None else {"result": result}
    return _line("response", {**_given(command_id=id), "success": True, **more})


def failed(id: str, error: str) -> bytes:
    """The answer to a command that failed."""
    return _line("response", {**_given(command_id=id), "success": False, "error": error})


def progress(id: str, text: str, fields: Mapping[str, Any]) -> bytes:
    """A command's progress. A number `progress` and a text `status` are sent as separate entries."""
    metadata = dict(fields)
    found = dict[str, Any]()
    if isinstance(metadata.get("progress"), (int, float)):
        found["progress"] = float(metadata.pop("progress"))
    if isinstance(metadata.get("status"), str):
        found["status"] = metadata.pop("status")
    return _line("command_progress", {**_given(command_id=id, text=text, metadata=metadata), **found})


def command_registry(commands: list[dict[str, Any]]) -> bytes:
    """All commands that the agent offers; they replace those sent earlier."""
    return _line("command_registry", {"commands": definitions(commands)})


def definitions(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The agent's commands in the daemon's format; it derives a title and the slash command's name where needed."""
    return [
        _given(
            **{name: value for name, value in each.items() if name not in ("arguments", "async_enabled")}
            | {
                "expose_as": each.get("expose_as") or ["agent_tool"],
                "argument_required": "argument_required" in each
                or any(argument["required"] for argument in each["arguments"])
                or None,
                "arguments": [
                    _given(**argument | {"required": argument["required"] or None}) for argument in each["arguments"]
                ],
                "async": each.get("async_enabled"),
            },
        )
        for each in commands
    ]


def system_prompt(prompt: str, replace: bool) -> bytes:
    """The system prompt that makes a model this agent; with `replace`, without the daemon's own."""
    return _line("system_prompt", {"prompt": prompt.strip(), **_given(replace=replace or None)})


def agent_description(description: str) -> bytes:
    """The purpose of the agent."""
    return _line("agent_description", {"description": description.strip()})


def sidebar_section(id: str, title: str, content: str, collapsed: bool) -> bytes:
    """A section of text that the user sees, new or changed."""
    return _line("sidebar_section", {"section_id": id, "title": title, "content": content, "collapsed": collapsed})


def sidebar_section_removal(id: str) -> bytes:
    """A section was removed."""
    return _line("sidebar_section_removal", {"section_id": id})


def error(text: str, code: int = 1) -> bytes:
    """The reason why the agent's process ends."""
    return _line("error", {"error": text, "code": code})


def _given(**fields: Any) -> dict[str, Any]:
    return {
        name: value for name, value in fields.items() if value is not None and value != "" and value not in ([], {})
    }


def _line(kind: str, data: dict[str, Any]) -> bytes:
    message = {"type": kind, "timestamp": datetime.now(UTC).isoformat(), "data": data}
    try:
        text = json.dumps(message, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        # Fields of a log line may have any value; the daemon would drop a line that it cannot read.
        text = json.dumps(message | {"data": _shown(data)})
    return text.encode() + b"\n"


def _shown(value: Any, depth: int = 0) -> Any:
    """Two levels of objects unchanged, and deeper values as text."""
    if isinstance(value, dict) and depth < 2:
        return {str(name): _shown(each, depth + 1) for name, each in value.items()}
    return value if isinstance(value, (str, int, type(None))) else repr(value)[:1000]


# The daemon's socket


def ask(timeout: float, **request: Any) -> dict[str, Any]:
    """Send one request to the daemon's socket and return its answer. Raises OSError, ValueError."""
    path = os.environ.get("OPPERATOR_SOCKET_PATH") or os.path.join(tempfile.gettempdir(), "opperator.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer = json.loads(answers.readline(MAX_LINE))
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is a {type(answer).__name__}, not an object")
    return answer


# Pipes


class Incoming:
    """The lines of a pipe. `close()`, from any thread, ends the reading."""

    def __init__(self, source: Any, too_long: Callable[[int], None]) -> None:
        self._file = source.fileno()
        self._too_long = too_long
        self._woken, self._waker = os.pipe()

    def __iter__(self) -> Iterator[bytes]:
        """Yield each line without its end. Skips empty ones, and, with a report, those longer than MAX_LINE."""
        parts = list[bytes]()
        size = 0
        while chunk := self._chunk():
            *whole, rest = chunk.split(b"\n")
            for piece in whole:
                size += len(piece)
                if size > MAX_LINE:
                    self._too_long(size)
                elif line := b"".join([*parts, piece]).strip():
                    yield line
                parts = []
                size = 0
            size += len(rest)
            if size <= MAX_LINE:
                parts.append(rest)
            else:
                parts.clear()
        if parts and (line := b"".join(parts).strip()):
            yield line

    def _chunk(self) -> bytes:
        ready, _, _ = select.select([self._file, self._woken], [], [])
        if self._woken in ready:
            return b""
        try:
            return os.read(self._file, _CHUNK)
        except OSError:  # the other end of a terminal or socket is closed
            return b""

    @property
    def hung_up(self) -> bool:
        """Whether the other end of the pipe is closed; lines may still be in the pipe."""
        poll = select.poll()
        poll.register(self._file, 0)
        return any(found & select.POLLHUP for _, found in poll.poll(0))

    def close(self) -> None:
        """Wake the reader, which then finds the end of the input."""
        os.write(self._waker, b"x")

    def free(self) -> None:
        """Close the descriptors opened here, after the reader has ended."""
        os.close(self._woken)
        os.close(self._waker)


class Outgoing:
    """Lines for a pipe, written by a thread, so that a slow reader blocks no sender. `lost` is called if it breaks."""

    def __init__(self, target: Any, lost: Callable[[], None]) -> None:
        self._file = target.fileno()
        self._lost = lost
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._logs = self._dropped = 0
        self._closed = self.broken = False
        self._thread = threading.Thread(target=self._write, name="opperator out", daemon=True)
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Queue a line; it is dropped once the pipe is broken."""
        with self._changed:
            if not self.broken:
                self._lines.append(line)
                self._changed.notify_all()

    def send_log(self, line: bytes) -> int:
        """Send a line, or drop it if too many wait. Returns the number dropped since the last sent line."""
        with self._changed:
            if len(self._lines) >= _WAITING_LOGS:
                self._dropped += 1
                return 0
            dropped = self._dropped
            self._dropped = 0
        self.send(line)
        return dropped

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._closed:
                        return
                    self._changed.wait()
                rest = memoryview(self._lines[0])
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                with self._changed:
                    self.broken = True
                    self._lines.clear()
                    self._changed.notify_all()
                self._lost()
                return
            with self._changed:
                self._lines.popleft()

    def close(self, seconds: float) -> bool:
        """Wait until everything is written, at most `seconds`; False if it was not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self.broken


class Busy:
    """Counts unfinished work in bytes, and in `done` what is finished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.done = 0

    def add(self, count: int) -> None:
        """Count up, or down by a negative number, and wake the waiting threads."""
        with self._changed:
            self._count += count
            self.done += max(0, -count)
            self._changed.notify_all()

    def wait(self, seconds: float, *, below: int = 1) -> bool:
        """Wait until less than `below` is left, by default nothing; False if it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count < below, seconds)


@contextmanager
def standard_streams() -> Iterator[tuple[Any, Any]]:
    """Lend standard input and output to the caller: other code prints to standard error, and reads an empty input.

    The process's own descriptors change, so that this also applies to libraries in C and to child processes.
    """
    sys.stdout.flush()
    ours = [os.dup(0), os.dup(1)]
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    try:
        with (
            os.fdopen(ours[0], "rb", buffering=0, closefd=False) as source,
            os.fdopen(ours[1], "wb", buffering=0, closefd=False) as target,
            redirect_stdout(sys.stderr),
        ):
            yield source, target
    finally:
        sys.stdout.flush()
        for number, file in enumerate(ours):
            os.dup2(file, number)
            os.close(file)
