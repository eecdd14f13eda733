"""Hears Sentinels say that another server is the primary now. Law: what they say is a reason to look, and no more.

Without it a client whose connections stay open to a primary that was cut off, and that goes on answering, would ask
nobody. All Sentinels are listened to, each by a thread of its own: one that is silent holds up nobody but its own.

Design: section 19.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis.exceptions as driver

from distributed_state.errors import StateError
from distributed_state.port.addresses import node_name
from distributed_state.port.errors import LOST, ReplyError
from distributed_state.port.facts import SentinelAnswer
from distributed_state.port.sockets import Socket

log = logging.getLogger(__name__)
# That a failover is over, and that a replica was promoted: in between the old primary takes writes that will be lost.
_SAID = (b"+switch-master", b"+promoted-slave")
_PATIENT = 1.0  # seconds for one of them to answer
_EVERY = 1.0  # seconds between two attempts to reach one that is away


def hear(node: str, service: str, ask: Callable[..., list[Any]]) -> SentinelAnswer:
    """What one Sentinel says of a service, and whether it could have a failover made now."""
    asked = partial(ask, node, timeout=_PATIENT, sentinel=True)
    named = service.encode()
    try:
        said, (host, port) = asked((b"SENTINEL", b"MASTER", named), (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", named))
    except StateError as error:
        return SentinelAnswer(node, problem=str(error))
    facts = dict(zip(said[::2], said[1::2], strict=True))
    refused = ""
    try:
        asked((b"SENTINEL", b"CKQUORUM", named))
    except StateError as error:
        refused = str(error)
    primary = node_name(host.decode(), int(port))
    return SentinelAnswer(node, primary, int(facts[b"config-epoch"]), int(facts[b"quorum"]), refused)


class SentinelWatch:
    """Threads that listen to Sentinels while they are wanted.

    `connect` makes a connection to one of them, which waits a second for each answer; `heard` is called, in such a
    thread, whenever the primary of the service may be another one.
    """

    def __init__(
        self, seeds: Sequence[str], service: str, connect: Callable[[str], Socket], heard: Callable[[], None]
    ) -> None:
        self._seeds = seeds
        self._service = service.encode()
        self._connect = connect
        self._heard = heard
        self._mutex = threading.Lock()
        self._listeners: list[_Listener] = []

    def begin(self) -> None:
        """Listen from now on, unless threads of this process do: they do not survive fork()."""
        with self._mutex:
            if not any(each.is_alive() for each in self._listeners):
                self._listeners = [_Listener(seed, self._service, self._connect, self._look) for seed in self._seeds]
                for each in self._listeners:
                    each.start()

    def end(self) -> None:
        """Stop listening."""
        with self._mutex:
            ending = [each for each in self._listeners if each.is_alive()]
            self._listeners = []
        for each in ending:
            each.stop()
        for each in ending:
            if each is not threading.current_thread():
                each.join(timeout=10)

    def inherited(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here, and no listener is."""
        self._mutex = threading.Lock()
        self._listeners = []

    def _look(self) -> None:
        try:
            self._heard()
        except StateError as error:
            log.warning("Sentinels: %s", error)


class _Listener(threading.Thread):
    """Listens to one Sentinel, and connects again when it has been away."""

    def __init__(self, seed: str, service: bytes, connect: Callable[[str], Socket], look: Callable[[], None]) -> None:
        super().__init__(name="distributed-state-sentinel", daemon=True)
        self._seed = seed
        self._service = service
        self._connect = connect
        self._look = look
        self._stopped = threading.Event()
        self._connection: Socket | None = None

    def stop(self) -> None:
        """Let it end, now."""
        self._stopped.set()
        if self._connection is not None:
            self._connection.shut()

    def run(self) -> None:
        """Listen until stopped."""
        while not self._stopped.is_set():
            try:
                self._connection = self._connect(self._seed)
                self._listen(self._connection)
            except (StateError, driver.RedisError, *LOST) as error:
                log.debug("Sentinel %s: %s", self._seed, error)
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            self._stopped.wait(_EVERY)

    def _listen(self, connection: Socket) -> None:
        connection.send(connection.packer.pack([(b"SUBSCRIBE", *_SAID)]))
        asked = False
        while not self._stopped.is_set():
            try:
                message = connection.answer()
            except (driver.TimeoutError, TimeoutError):
                # Nothing came for a second. One that was cut off without a word never says anything again.
                if asked:
                    raise
                connection.send(connection.packer.pack([(b"PING",)]))
                asked = True
            else:
                asked = False
                self._understand(message)

    def _understand(self, message: Any) -> None:
        if isinstance(message, ReplyError):
            log.warning("Sentinel %s does not let us hear of another primary: %s", self._seed, message)
        # What was said before it listened, nobody hears.
        elif message[0] == b"subscribe" or (message[0] == b"message" and self._service in message[2].split(b" ")):
            self._look()
