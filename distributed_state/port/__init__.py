"""The interface to everything outside of the core: Redis, clocks, threads, tasks. Law: the core awaits only a port.

`asyncio` and `blocking` hold the two implementations. The blocking one answers every await at once, so `finish` can run
a coroutine of the core without an event loop.

Design: section 16.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, Protocol, TypeVar

from distributed_state.port.commands import Filled as Filled
from distributed_state.port.commands import Script as Script
from distributed_state.port.commands import Words as Words
from distributed_state.port.identities import KnownReplicas, SentinelAnswer, ServerIdentity

T = TypeVar("T")
Mutex = Lock  # for state that all threads and event loops of a process share
Call = tuple[Script, Sequence[bytes], Sequence[Any]]


class Signal(Protocol):
    """Wakes its waiters. Stays set until cleared."""

    def set(self) -> None:
        """Wake all waiters, from any thread."""
        ...

    def clear(self) -> None:
        """Make later calls of `wait` block again."""
        ...

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        ...


class Job(Protocol):
    """A background thread or task of the store."""

    def ask(self) -> None:
        """Ask the job to end."""
        ...

    async def stop(self) -> None:
        """Ask the job to end, and wait for that, up to a limit that counts from the first request."""
        ...


class Wire(Protocol):
    """One subscription connection."""

    def post(self, *words: Any) -> None:
        """Send without waiting for a reply."""
        ...

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """Send one command per channel, in one write."""
        ...

    async def receive(self) -> list[Any]:
        """Return the next message; an error reply comes as [b"error", its text].

        Raises WarmUnavailable when the connection is lost or closed.
        """
        ...

    def close(self) -> None:
        """Drop the connection; a pending `receive` raises an error."""
        ...


class Guard(Protocol):
    """Interrupts the body of a `with` when a lease is lost, if the API can do that."""

    def interrupt(self, error: Exception | None = None) -> None:
        """End the body now: a task is cancelled; blocking code raises `error`, if any, at its next call to a server."""
        ...

    def leave(self, error: BaseException | None) -> bool:
        """True if `error` is the interruption that this guard caused."""
        ...

    @property
    def fired(self) -> bool:
        """Whether an interruption has reached the body."""
        ...

    def check(self) -> None:
        """Raise the error of an interruption that this thread has not noticed yet; a task is interrupted by itself."""
        ...

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        """Return the error with which the body ended; waits for an interruption that is still on its way to it."""
        ...


class Port(Protocol):
    """Everything outside of the core that it may use."""

    monotonic: Callable[[], float]

    @property
    def suspends(self) -> bool:
        """Whether the caller runs in an event loop, so that user code may await."""
        ...

    def here(self) -> object:
        """Return the event loop of the caller's task, or None for blocking code: the callers that wait together.

        Blocking code may block a loop, so it never waits for work that only a task of that loop can do.
        """
        ...

    def holds_up(self, here: object) -> bool:
        """Whether the caller is blocking code that a coroutine of this event loop called; False if `here` is None."""
        ...

    def loop_of(self, owner: object) -> object:
        """Return the event loop if `owner` is a task, None if it is a thread."""
        ...

    def when_a_loop_ends(self, call: Callable[[object], None]) -> None:
        """Call this function with each event loop that has ended together with its tasks. `call` must not wait."""
        ...

    @property
    def several(self) -> bool:
        """Whether one server may answer in place of another: a cluster, or primaries that Sentinels choose."""
        ...

    @property
    def is_cluster(self) -> bool:
        """Whether keys may move from one server to another."""
        ...

    def wall(self) -> float:
        """Return the worker's own clock, in seconds since 1970. Only for display: it may jump."""
        ...

    async def open(self) -> None:
        """Connect to the server, or raise WarmUnavailable."""
        ...

    async def close(self) -> None:
        """Drop all connections."""
        ...

    def abandon(self) -> None:
        """After fork(): forget the parent's connections without sending anything."""
        ...

    def node_of(self, key: bytes) -> str:
        """Return the server that has this key now, as "host:port"; "" if embedded.

        Raises WarmUnavailable if no server has it.
        """
        ...

    def nodes(self) -> list[str]:
        """Return all servers that have keys: only one, except in a cluster."""
        ...

    async def identity_of(self, node: str) -> ServerIdentity:
        """Ask a server for its current data id; connections made under another one are dropped."""
        ...

    def known_data_id(self, node: str) -> str:
        """Return the data id under which the newest connection to a server was made, "" if there was none."""
        ...

    async def has_data_elsewhere(self, data_id: str, node: str) -> bool:
        """Whether another server is a primary with this data id and was not replaced."""
        ...

    async def relocate(self) -> None:
        """Find out again where keys are, because a server did not answer or lost its keys. Updates `node_of`.

        Raises WarmUnavailable or ConfigurationError.
        """
        ...

    def replicas(self, node: str) -> KnownReplicas | None:
        """Return the replicas of a primary, as its Sentinels or cluster know them; None if only the primary knows.

        Blocks, for a second for each server that does not answer. Raises WarmUnavailable or ConfigurationError.
        """
        ...

    def sentinels(self) -> list[SentinelAnswer]:
        """Ask each Sentinel that the URL names, if any. Blocks, for a second for each that does not answer."""
        ...

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        """Send commands together, each to the server that has its first key; one round trip.

        An error reply is returned in its place. If one of several servers cannot be reached, its replies are
        WarmUnavailable. A failed command does not stop the later ones; work that depends on an earlier command has to
        be a script that checks for itself. Raises WarmUnavailable when all replies are missing: the commands may or may
        not have been executed.
        """
        ...

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        """Send commands to one server, independent of their keys; otherwise like `exchange`."""
        ...

    async def command(self, *words: Any) -> Any:
        """Execute one command. Raises errors that `exchange` would return."""
        ...

    async def command_with(self, node: str, *words: Any) -> Any:
        """Execute one command on this server. Raises errors that `exchange_with` would return."""
        ...

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        """Send commands together; one round trip. Raises the first error reply."""
        ...

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Call one script, and load it if the server does not know it."""
        ...

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        """Call many scripts in one round trip. An error reply is returned in its place."""
        ...

    async def apart(self, node: str, calls: Sequence[Call], behind: Sequence[Words]) -> list[Any]:
        """Call scripts, then send commands that may block, on a separate connection, so that no other caller waits.

        Nothing is sent to the embedded server, which has nothing to wait for. An error reply is returned in its place.
        Raises WarmUnavailable when no reply came.
        """
        ...

    async def wire(self, node: str) -> Wire:
        """Open a separate connection to a server, for a subscription."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking other callers."""
        ...

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run blocking code without blocking other callers."""
        ...

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a user's blocking code, without a time limit and without blocking other callers."""
        ...

    async def complete(self, work: Awaitable[T]) -> T:
        """Wait for the result of a user's coroutine function, which may await anything.

        A cancellation that is not the caller's own raises RuntimeError, for example when it awaited a task that it had
        cancelled.
        """
        ...

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish the work even if the caller is cancelled meanwhile."""
        ...

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `shield`, for work that callers of other event loops and threads may wait for."""
        ...

    async def drive_start(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `drive`, for starting a partition: it may take seconds, and driven work does not wait for it."""
        ...

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        """Run a coroutine function of the store itself in the background: in a task or a thread."""
        ...

    def ask_all(self) -> None:
        """Ask all jobs of `spawn` to end, before waiting for any of them."""
        ...

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        """Like `spawn`, but in a task of the caller's loop or a thread, because the job calls the user's code."""
        ...

    def mutex(self) -> AbstractContextManager[Any]:
        """Return a lock for a few plain statements; it is never held across an await."""
        ...

    def signal(self) -> Signal:
        """Return a new signal, not set."""
        ...

    def guard(self) -> Guard:
        """Return a guard of the running task's body."""
        ...

    def owner(self) -> object:
        """Return the running task or thread."""
        ...
