"""The only door to the outside: Redis, clocks, threads, tasks. Law: the core awaits nothing but a port.

`asyncio` and `blocking` hold the two implementations. The blocking one answers every await at once, so `finish` can
run a coroutine of the core without an event loop.

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
from distributed_state.port.lives import KnownReplicas, Life, SentinelAnswer

T = TypeVar("T")
Mutex = Lock  # for what all threads and event loops of a process share
Call = tuple[Script, Sequence[bytes], Sequence[Any]]


class Signal(Protocol):
    """Wakes whoever waits. Stays set until cleared."""

    def set(self) -> None:
        """Wake all who wait, from any thread."""
        ...

    def clear(self) -> None:
        """Let whoever waits from now on wait."""
        ...

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        ...


class Job(Protocol):
    """A thread or a task of the store's own."""

    def ask(self) -> None:
        """Ask it to end."""
        ...

    async def stop(self) -> None:
        """Ask it to end and wait until it has ended, for a limited time since it was first asked."""
        ...


class Wire(Protocol):
    """One subscription connection."""

    def post(self, *words: Any) -> None:
        """Send without waiting for an answer."""
        ...

    def post_all(self, kind: bytes, channels: Sequence[bytes]) -> None:
        """The same, a command for each channel, in one write."""
        ...

    async def receive(self) -> list[Any]:
        """The next message; an answer that is an error as [b"error", its text].

        Raises WarmUnavailable when the connection is lost or closed.
        """
        ...

    def close(self) -> None:
        """Drop the connection; whoever receives gets an error."""
        ...


class Guard(Protocol):
    """Ends the body of a `with` when a lease is lost, where the face can do that."""

    def interrupt(self) -> None:
        """End the body now, where that can be done."""
        ...

    def leave(self, error: BaseException | None) -> bool:
        """True if `error` is the interruption that this guard caused."""
        ...


class Port(Protocol):
    """Everything the core may ask of the outside."""

    monotonic: Callable[[], float]

    @property
    def suspends(self) -> bool:
        """Whether the caller may await something of its own."""
        ...

    def here(self) -> object:
        """What waits together: the event loop of the caller's task, or None for blocking code.

        Blocking code may hold a loop up, so it never waits for what only a task of that loop can do.
        """
        ...

    def holds_up(self, here: object) -> bool:
        """Whether the caller is blocking code that a coroutine of this event loop called; never if it is None."""
        ...

    def loop_of(self, owner: object) -> object:
        """The event loop of an `owner` that is a task, None of a thread."""
        ...

    def when_a_loop_ends(self, call: Callable[[object], None]) -> None:
        """Call this with each event loop that has ended: its tasks have, too. It must not wait."""
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
        """The worker's own clock, in seconds since 1970: to be shown only, it jumps."""
        ...

    async def open(self) -> None:
        """Reach the server, or raise WarmUnavailable."""
        ...

    async def close(self) -> None:
        """Drop all connections."""
        ...

    def abandon(self) -> None:
        """After fork(): forget the parent's connections without a word on the wire."""
        ...

    def node_of(self, key: bytes) -> str:
        """The server that has this key now, as "host:port"; "" if embedded. Raises WarmUnavailable if none has."""
        ...

    def nodes(self) -> list[str]:
        """All servers that have keys: one, unless in a cluster."""
        ...

    async def life_of(self, node: str) -> Life:
        """Ask a server which life of its data it is in; connections that were made in another one are dropped."""
        ...

    def known_life(self, node: str) -> str:
        """The name of the life that the newest connection to a server was made in, "" if there was none."""
        ...

    async def lives_elsewhere(self, name: str, node: str) -> bool:
        """Whether another server than this one is a primary in the life of that name, and was not replaced."""
        ...

    async def relocate(self) -> None:
        """Find out again where keys are: a server did not answer, or does not have them any more. `node_of` knows then.

        Raises WarmUnavailable or ConfigurationError.
        """
        ...

    def replicas(self, node: str) -> KnownReplicas | None:
        """Which replicas a primary has, as those who would promote one know; None if only the primary does.

        Blocks, for a second for each that is silent. Raises WarmUnavailable or ConfigurationError.
        """
        ...

    def sentinels(self) -> list[SentinelAnswer]:
        """Ask each Sentinel that the URL names, if it names any; blocks, for a second for each that is silent."""
        ...

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        """Send commands together, each to the server that has its first key; one round trip.

        An answer that is an error is returned in its place; of several servers' those of one that cannot be reached,
        too, as WarmUnavailable. Each command is carried out whatever became of those before it; what depends on that
        is a script, and looks itself. Raises WarmUnavailable when all answers are missing: the commands may or may not
        have been carried out.
        """
        ...

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        """Send commands to one server, whatever keys they name; otherwise as `exchange`."""
        ...

    async def command(self, *words: Any) -> Any:
        """One command. Raises what `exchange` would return."""
        ...

    async def command_with(self, node: str, *words: Any) -> Any:
        """One command, with this server. Raises what `exchange_with` would return."""
        ...

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        """Send commands together; one round trip. Raises the first answer that is an error."""
        ...

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """One script call, loaded if the server does not know it."""
        ...

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        """Many script calls in one round trip. An answer that is an error is returned in its place."""
        ...

    async def apart(self, node: str, calls: Sequence[Call], behind: Sequence[Words]) -> list[Any]:
        """Scripts, and commands behind them that may wait, on one connection to a server; it holds up nobody else.

        The embedded server is not asked: it has nothing to wait for. An answer that is an error is returned in its
        place. Raises WarmUnavailable when no answer came.
        """
        ...

    async def wire(self, node: str) -> Wire:
        """Open a connection of its own to a server, for a subscription."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait without holding up others."""
        ...

    async def sql(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run blocking code without holding up others."""
        ...

    async def thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a user's blocking code, for as long as it takes, without holding up others."""
        ...

    async def complete(self, work: Awaitable[T]) -> T:
        """Wait for what a user's coroutine function returned, which awaits whatever it likes.

        A cancellation that is not the caller's own, as of a task that it cancelled and waited for, is a RuntimeError.
        """
        ...

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish the work even if the caller is cancelled meanwhile."""
        ...

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """As `shield`, for work that callers of other event loops and threads may wait for."""
        ...

    async def drive_start(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for what starts a partition: it may take seconds, and what is driven does not wait for it."""
        ...

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        """Run a coroutine function of the store's own in the background: in a task or a thread."""
        ...

    def ask_all(self) -> None:
        """Ask all that `spawn` began to end, before any of it is waited for."""
        ...

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> Job:
        """The same where the caller runs, as what the job calls is the user's: in a task of its loop, or a thread."""
        ...

    def mutex(self) -> AbstractContextManager[Any]:
        """A lock for a few plain statements; never held across an await."""
        ...

    def signal(self) -> Signal:
        """Make a signal, not set."""
        ...

    def guard(self) -> Guard:
        """Make a guard of the running task's body."""
        ...

    def owner(self) -> object:
        """The running task or thread."""
        ...
