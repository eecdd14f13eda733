"""Hears Sentinels say that another server is the primary now. Law: what they say is a reason to look, and no more.

Without it a client whose connections stay open to a primary that was cut off, and that goes on answering, would ask
nobody. All Sentinels are listened to, as some may be dead or cut off; one that comes back may have said it meanwhile.

Design: section 19.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions as driver

from distributed_state.errors import StateError
from distributed_state.port.errors import LOST
from distributed_state.port.sockets import Socket, pack

log = logging.getLogger(__name__)
_EVERY = 1.0  # seconds between two attempts to reach those that are away


class SentinelWatch:
    """A thread that listens to Sentinels while it is wanted.

    `connect` makes a connection to one of them; `heard` is called, in this thread, whenever the primary of the service
    may be another one.
    """

    def __init__(
        self, seeds: Sequence[str], service: str, connect: Callable[[str], Socket], heard: Callable[[], None]
    ) -> None:
        self._seeds = seeds
        self._service = service.encode()
        self._connect = connect
        self._heard = heard
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def begin(self) -> None:
        """Listen from now on, unless a thread of this process does: one does not survive fork()."""
        with self._mutex:
            if self._thread is None or not self._thread.is_alive():
                self._wake, ours = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._run, args=(ours,), name="distributed-state-sentinels", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Stop listening."""
        with self._mutex:
            thread = self._thread
            self._thread = None
            if self._wake is not None:
                self._wake.close()
                self._wake = None
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=10)

    def _run(self, ours: socket.socket) -> None:
        listening: dict[str, Socket] = {}
        with ours, selectors.DefaultSelector() as selector:
            selector.register(ours, selectors.EVENT_READ)
            try:
                while True:
                    self._join(listening, selector)
                    for key, _ in selector.select(_EVERY):
                        if key.data is None:
                            return  # the other end was closed
                        self._hear(key.data, listening, selector)
            finally:
                for each in listening.values():
                    each.close()

    def _join(self, listening: dict[str, Socket], selector: selectors.BaseSelector) -> None:
        """Listen to those that are not listened to."""
        joined = False
        for seed in self._seeds:
            if seed not in listening:
                try:
                    connection = self._connect(seed)
                    connection.send(pack([(b"SUBSCRIBE", b"+switch-master")]))
                except (StateError, driver.RedisError, *LOST) as error:
                    log.debug("Sentinel %s: %s", seed, error)
                    continue
                listening[seed] = connection
                selector.register(connection, selectors.EVENT_READ, seed)
                joined = True
        if joined:
            self._look()

    def _hear(self, seed: str, listening: dict[str, Socket], selector: selectors.BaseSelector) -> None:
        connection = listening[seed]
        messages: list[Any] = []
        try:
            messages = connection.arrived()
        except (driver.RedisError, *LOST) as error:
            log.debug("Sentinel %s: %s", seed, error)
            selector.unregister(connection)
            del listening[seed]
            connection.close()
        if any(each[0] == b"message" and each[2].split(b" ")[0] == self._service for each in messages):
            self._look()

    def _look(self) -> None:
        try:
            self._heard()
        except StateError as error:
            log.warning("Sentinels: %s", error)
