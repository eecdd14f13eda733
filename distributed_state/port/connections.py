"""Connects to Redis. Law: the driver only makes the handshake.

redis-py handles TLS, user and password, which may rotate, the database and CLIENT SETINFO. Every connection speaks
RESP2 and never retries by itself.

Design: section 19.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import redis.asyncio.connection as theirs_asyncio
import redis.connection as theirs
import redis.exceptions as driver
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port import Filled, identities, waited
from distributed_state.port.addresses import host_and_port, read_address
from distributed_state.port.commands import BROKEN, Packer, ReplyError, encode, packed, translate
from distributed_state.port.embedded import EmbeddedServer
from distributed_state.port.identities import KnownReplicas, SentinelAnswer, ServerIdentity
from distributed_state.port.sockets import Socket, nothing, speaks_plainly, speaks_tls
from distributed_state.port.topology import SentinelWatch, Topology, threads
from distributed_state.port.topology import ask_sentinel as hear
from distributed_state.port.topology import replicas_behind_sentinels as behind_sentinels
from distributed_state.port.topology import replicas_in_cluster as in_cluster
from distributed_state.port.waited import Limits

_ROLE: Filled = (b"ROLE",)
_DOUBTFUL = 0.5  # seconds after which a first answer is late enough to doubt that the server speaks TLS
log = logging.getLogger(__name__)
Credentials = Callable[[], tuple[str, str]]


class _Asked(CredentialProvider):
    """A user's function that is asked for user and password at each connection, so that tokens may rotate.

    Any exception of the function becomes WarmUnavailable, so that background jobs continue and try again.
    """

    def __init__(self, ask: Credentials, place: str) -> None:
        self._ask = ask
        self._place = place

    def get_credentials(self) -> tuple[str, str]:
        try:
            user, password = self._ask()
        except Exception as error:
            raise WarmUnavailable(f"{self._place}: credentials= raised {type(error).__name__}: {error}") from error
        return user, password

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()


async def _answer(connection: Any) -> Any:
    """Return the reply to the last command, NOPERM as a value instead of an exception."""
    try:
        return await connection.read_response()
    except driver.NoPermissionError as error:
        return ReplyError(f"NOPERM {error}")


class _Words:
    """Encodes the commands of a handshake; the driver would use hiredis, which a signal must not interrupt."""

    def pack(self, *words: Any) -> list[bytes]:
        """Encode one command; the driver gives some names as two words in one text."""
        return [packed((*encode(words[0]).split(), *words[1:]))]


class Connections:
    """Makes connections of one URL, and knows its current servers; shared by all ports of a store."""

    def __init__(
        self, url: str | None, timeout: float, credentials: Credentials | None = None, *, retry_for: float = 0.0
    ) -> None:
        address = None if url is None else read_address(url)
        self.timeout = timeout
        self.place = "the embedded server" if address is None else address.place
        self.limits = Limits(retry_for or timeout, timeout, self.place)
        self.data_ids: dict[str, str] = {}  # by server: the data id of its newest connection
        self.embedded: EmbeddedServer | None = None
        self._watch: SentinelWatch | None = None
        self.topology = Topology(address, timeout, self.ask, self.executor)
        if address is None:
            self.embedded = EmbeddedServer()
            return
        self.address = address
        self._options = address.options
        if credentials is not None:
            if {"username", "password"} & address.options.keys():
                raise ConfigurationError(
                    f"{self.place}: give user and password in the url or by credentials=, not both"
                )
            self._options = address.options | {"credential_provider": _Asked(credentials, self.place)}
        if address.kind == "sentinel":
            self._watch = SentinelWatch(address.seeds, address.service, self._connect_sentinel, self._switched)
        try:
            self._blocking(address.seeds[0], self._options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.place}: an option of the url is wrong: {error}") from error

    def _blocking(self, node: str, options: dict[str, Any], timeout: float = 0) -> Any:
        """Return a connection of the driver's, not connected yet."""
        seconds = timeout or self.timeout
        given = options | {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
            "command_packer": _Words(),
        }
        if self.address.unix:
            unix: Any = theirs.UnixDomainSocketConnection
            return unix(**given)
        host, port = host_and_port(node)
        kind = theirs.SSLConnection if self.address.tls else theirs.Connection
        return kind(host=host, port=port, **given)

    def connect(
        self,
        node: str,
        on_error: Callable[[str], Exception] = ReplyError,
        begun: Callable[[Socket], None] = lambda _: None,
        seconds: float = math.inf,
    ) -> Socket:
        """Connect a `Socket` for one caller at a time; `seconds` is the limit for each of its replies.

        Raises WarmUnavailable or ConfigurationError.
        """
        late = self.late if self.topology.several else nothing
        made = self._blocking(node, self._options, min(seconds, self.timeout))
        try:
            socket = Socket(made, self.timeout, on_error, late, begun)
            try:
                if self.address.kind == "sentinel":
                    self._require_primary(node, socket.exchange(socket.packer.pack([_ROLE]), 1, seconds)[0])
                answer = socket.exchange(socket.packer.pack([identities.INFO]), 1, seconds)[0]
                socket.packer = Packer(self.met(node, identities.read(answer)))
            except BaseException:
                socket.close()
                raise
        except (ReplyError, *BROKEN) as error:
            raise translate(error, self.place) from error
        return socket

    async def connect_asyncio(self, node: str) -> tuple[Any, str]:
        """Connect on the running event loop; return the driver's connection and its data id. Raises as `connect`."""
        connection = self._asyncio(node)
        try:
            async with asyncio.timeout(self.timeout):
                await connection.connect()
                if self.address.kind == "sentinel":
                    await connection.send_command(*_ROLE)
                    self._require_primary(node, await connection.read_response())
                await connection.send_command(*identities.INFO)
                data_id = self.met(node, identities.read(await _answer(connection)))
        except (TimeoutError, *BROKEN) as error:
            await connection.disconnect(nowait=True)
            raise translate(error, self.place) from error
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection, data_id

    def _asyncio(self, node: str) -> Any:
        # No read timeout in the driver: a shared connection is read without pause, and each caller has its own timeout.
        given = self._options | {
            "protocol": 2,
            "retry": AsyncRetry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": self.timeout,
        }
        if self.address.unix:
            return theirs_asyncio.UnixDomainSocketConnection(**given)
        host, port = host_and_port(node)
        kind = theirs_asyncio.SSLConnection if self.address.tls else theirs_asyncio.Connection
        return kind(host=host, port=port, **given)

    def _require_primary(self, node: str, role: Any) -> None:
        """Raise an error unless the server is a primary.

        Sentinels name a server as primary before it knows of its promotion, and after its demotion.
        """
        if isinstance(role, Exception):
            raise translate(role, self.place) from role
        if not isinstance(role, list) or role[0] not in (b"master", "master"):
            found = role[0] if isinstance(role, list) else role
            raise driver.ConnectionError(f"{node} is not the primary, as Sentinels say: its role is {found!r:.80}")

    def met(self, node: str, server: ServerIdentity) -> str:
        """Note the data id of a server; its connections that were made under another one are dropped."""
        known = self.data_ids.get(node)
        self.data_ids[node] = server.data_id
        if known not in (None, server.data_id):
            log.info("%s: %s has a new data id", self.place, node)
            self.topology.drop(node)
        return server.data_id

    def used(self, drop: Callable[[str], None]) -> None:
        """Register a port: `drop` is called, by any thread, with each server that is no longer used."""
        self.topology.on_gone(drop)
        if self._watch is not None and self.topology.only is not None:
            self._watch.begin()  # the port that looked may have been closed since

    def unused(self, drop: Callable[[str], None]) -> None:
        """Unregister a port that is closed."""
        if self.topology.forget(drop) and self._watch is not None:
            self._watch.end()

    def inherited(self, drop: Callable[[str], None]) -> None:
        """Unregister a port that belongs to the parent from which this process was forked."""
        if self._watch is not None:
            self._watch.inherited()
        self.unused(drop)
        # The first command looks again and starts the watch, so that this process is notified of switches like its
        # parent.
        self.topology.inherited()

    def look(self, seconds: float = math.inf) -> None:
        """Find out where keys are, and watch for changes from now on. Raises as `Topology.look`."""
        self.topology.look(min(seconds, self.limits.total))
        if self._watch is not None:
            self._watch.begin()
            if not self.topology.is_used:
                self._watch.end()  # the last port was closed during this look

    def sentinels(self) -> list[SentinelAnswer]:
        """Return the answer of each Sentinel, asked one after the other; empty unless the URL names Sentinels."""
        if self.embedded is not None or self.address.kind != "sentinel":
            return []
        return [hear(seed, self.address.service, self.ask) for seed in self.address.seeds]

    def replicas(self, node: str) -> KnownReplicas | None:
        """Return the replicas of a primary; None if only the primary knows them. Raises as `connect`."""
        if self.topology.kind == "cluster":
            return in_cluster(node, self.ask)
        if self.topology.kind == "sentinel":
            return behind_sentinels(self.address.seeds, self.address.service, node, self.ask)
        return None

    def executor(self, count: int) -> Executor:
        """Return an executor that calls `ask` for this many servers at once."""
        return threads(count)

    def late(self, seconds: float = math.inf) -> None:
        """Called when a reply is late: if another server has the keys now, drop this one."""
        self.topology.doubt()
        try:
            self.look(seconds)
        except StateError as error:
            log.debug("%s: %s", self.place, error)

    def _switched(self) -> None:
        self.topology.doubt()
        self.topology.look()

    def _connect_sentinel(self, node: str) -> Socket:
        try:
            return Socket(self._blocking(node, self.address.sentinel_options, 1.0), 1.0)
        except BROKEN as error:
            raise translate(error, self.place) from error

    def ask(self, node: str, *commands: Filled, timeout: float, sentinel: bool = False) -> list[Any]:
        """Ask a server where keys are, on a separate connection. Raises as `connect`, and for an error reply."""
        # Without the database: a cluster's error for a missing database differs from server to server.
        options = self.address.sentinel_options if sentinel else self._options | {"db": 0}
        began = time.monotonic()
        if (account := waited.present()) is not None:
            timeout = min(timeout, account.left(began, node, self.limits))
        try:
            answers = self._answers(node, options, commands, timeout)
        except BROKEN as error:
            if account is not None:
                account.add(began, node)
            raise translate(error, self.place) from error
        for answer in answers:
            if isinstance(answer, Exception):
                raise translate(answer, self.place) from answer
        return answers

    def _answers(self, node: str, options: dict[str, Any], commands: Sequence[Filled], timeout: float) -> list[Any]:
        if self.data_ids or self.address.unix:
            return self._exchange(node, options, commands, timeout)
        # The first contact. A server without TLS waits for the end of a command that never comes, so a handshake that
        # takes long is given up, to see whether it is one.
        short = min(timeout, _DOUBTFUL) if self.address.tls else timeout
        try:
            return self._exchange(node, options, commands, short)
        except BROKEN as error:
            self._require_its_protocol(node, error)
            if short == timeout:
                raise
        return self._exchange(node, options, commands, timeout)

    def _exchange(self, node: str, options: dict[str, Any], commands: Sequence[Filled], timeout: float) -> list[Any]:
        socket = Socket(self._blocking(node, options, timeout), timeout)
        answers = socket.exchange(socket.packer.pack(commands), len(commands))
        socket.close()
        return answers

    def _require_its_protocol(self, node: str, error: Exception) -> None:
        """Raise ConfigurationError if this server speaks TLS and the URL says that it does not, or the reverse."""
        place = host_and_port(node)
        if self.address.tls and speaks_plainly(place, _DOUBTFUL):
            say = "does not speak TLS: use the port that does, or redis:// instead of rediss://"
        elif not self.address.tls and not isinstance(error, driver.TimeoutError) and speaks_tls(place, _DOUBTFUL):
            say = "speaks TLS: use rediss:// instead of redis://"
        else:
            return
        raise ConfigurationError(f"{self.place}: {node} {say}") from error
