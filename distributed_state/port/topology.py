"""Which server has which key now: one, the one that Sentinels name, or several of a cluster.

Law: what a server says of itself is not enough. A primary that was cut off with its Sentinel or its part of a cluster
still calls itself one, so all are asked, and the highest config epoch wins; a lower one never replaces it.

One object for all connections of a store, whatever thread or event loop they belong to. Looking blocks: an event loop
lends a thread for it.

Design: section 19.
"""

from __future__ import annotations

import logging
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from typing import Any

from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port.addresses import Address, host_and_port, node_name

log = logging.getLogger(__name__)
SLOTS = 16384
_QUICK = 1.0  # seconds for a server to say what it knows of the others
_PAUSE = 0.05  # between two looks
_OFTEN = 1.0  # and between those for which the only reason is a slot that moved


def slot_of(key: bytes) -> int:
    """The slot of a key in a cluster, as the cluster specification has it."""
    opened = key.find(b"{")
    if opened >= 0:
        closed = key.find(b"}", opened + 1)
        if closed > opened + 1:
            key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


class Topology:
    """Where keys are, as last seen."""

    def __init__(self, address: Address | None, timeout: float, ask: Callable[..., list[Any]]) -> None:
        self._address = address  # None: embedded
        self._timeout = timeout
        self._ask = ask
        self.kind = "embedded" if address is None else address.kind
        """"embedded", "sentinel", "cluster", or "plain": a server that may turn out to be one of a cluster."""
        self.only: str | None = "" if address is None else None
        """The one server that has all keys; None before the first look, and in a cluster."""
        self.doubted = address is not None
        """Whether to look before the next command."""
        self.looks = 0
        self._slots: list[str] = []
        self._known: set[str] = set()  # servers of a cluster, replicas too: any can be asked
        self._by_tag: dict[bytes, str] = {}
        self._epoch = -1  # of the primary that Sentinels named last
        self._looked = 0.0
        self._looking = threading.Lock()
        self._gone: list[Callable[[str], None]] = []

    @property
    def _where(self) -> Address:
        assert self._address is not None, "an embedded server is nowhere else"
        return self._address

    def on_gone(self, drop: Callable[[str], None]) -> None:
        """Have a function called, by any thread, with each server that is no more asked."""
        self._gone.append(drop)

    def forget(self, drop: Callable[[str], None]) -> bool:
        """Call it no more; whether nobody is left to call."""
        with suppress(ValueError):
            self._gone.remove(drop)
        return not self._gone

    def node_of(self, key: bytes) -> str:
        """The server that has a key. Raises WarmUnavailable if none is known to have it."""
        if self.only is not None:
            return self.only
        opened = key.find(b"{")
        tag = key[opened + 1 : key.find(b"}", opened)] if opened >= 0 else key
        node = self._by_tag.get(tag)
        if node is None:
            slot = slot_of(key)
            node = self._slots[slot] if self._slots else ""
            if not node:
                self.doubted = True
                raise WarmUnavailable(f"{self._where.place}: no server is known to have slot {slot}")
            self._by_tag[tag] = node
        return node

    def nodes(self) -> list[str]:
        """All servers that have keys."""
        return [self.only] if self.only is not None else sorted({node for node in self._slots if node})

    def doubt(self) -> None:
        """Something says that keys may be elsewhere now: look before the next command."""
        # Of a server that is no cluster's there is nothing more to learn.
        self.doubted = self.kind in ("sentinel", "cluster") or self.only is None

    def moved(self, slot: int, node: str, answered: str) -> None:
        """A server said where a slot is now. `answered` is that server: it may leave its own host out."""
        if node.startswith(":"):
            node = node_name(host_and_port(answered)[0], node[1:])
        with self._looking:
            if self.kind != "cluster":
                # A plain address that is a server of a cluster, and was not allowed to say so.
                self.kind = "cluster"
                self.only = None
                self.doubted = True
            if not self._slots:
                self._slots = [""] * SLOTS
            self._slots[slot] = node
            self._known.add(node)
            self._by_tag = {}
            # One slot that moved is rarely alone; but while a cluster is resharded, every look is out of date at once.
            self.doubted = self.doubted or time.monotonic() - self._looked > _OFTEN

    def look(self) -> None:
        """Find out where keys are. Raises WarmUnavailable or ConfigurationError; may take a second."""
        asked = time.monotonic()
        with self._looking:
            if self._looked > asked:
                return  # somebody looked while we waited
            left = self._looked + _PAUSE - asked
            if left > 0:
                time.sleep(left)
            try:
                before = self.nodes()
                if self.kind == "sentinel":
                    self._look_at_sentinels()
                elif self.kind == "cluster":
                    self._look_at_cluster(self._known | set(self._where.seeds))
                else:
                    self._look_at_server()
                self.doubted = False
            finally:
                self._looked = time.monotonic()
                self.looks += 1
        after = self.nodes()
        for node in before:
            if node not in after:
                log.info("%s: %s is no more asked; %s", self._where.place, node, ", ".join(after))
                for drop in list(self._gone):
                    drop(node)

    def _look_at_server(self) -> None:
        """A plain address: a server, or one of a cluster."""
        seed = self._where.seeds[0]
        said: Any = []
        try:
            (said,) = self._ask(seed, (b"HELLO",), timeout=self._timeout)
        except ConfigurationError as error:
            if "lacks a right" not in str(error) and "unknown command" not in str(error):
                raise
            # Then a cluster shows when it answers MOVED.
        pairs = dict(zip(said[::2], said[1::2], strict=False)) if isinstance(said, list) else {}
        if pairs.get(b"mode") != b"cluster":
            self.only = seed
            return
        if self._where.options.get("db"):
            raise ConfigurationError(f"{self._where.place}: a server of a cluster, which has database 0 alone")
        self.kind = "cluster"
        self._look_at_cluster({seed})

    def _look_at_cluster(self, known: Iterable[str]) -> None:
        owners: list[tuple[int, str]] = [(-1, "")] * SLOTS
        found: set[str] = set()
        views = self._ask_all(known, (b"CLUSTER", b"SLOTS"), (b"CLUSTER", b"NODES"))
        for asked, (slots, nodes) in views.items():
            epochs = _config_epochs(nodes)
            for first, last, primary, *replicas in slots:
                epoch = epochs.get(primary[2], 0)
                owner = _endpoint(primary, asked)
                found.update((owner, *(_endpoint(each, asked) for each in replicas)))
                for slot in range(first, last + 1):
                    if epoch > owners[slot][0]:
                        owners[slot] = (epoch, owner)
        self._slots = [owner for _, owner in owners]
        self._known = found
        self._by_tag = {}

    def _look_at_sentinels(self) -> None:
        """Ask all: one that was cut off with the old primary still names it, under an older epoch."""
        service = self._where.service
        named: list[tuple[int, str]] = []
        answers = self._ask_all(self._where.seeds, (b"SENTINEL", b"MASTER", service.encode()), sentinel=True)
        for (said,) in answers.values():
            facts = dict(zip(said[::2], said[1::2], strict=True))
            named.append((int(facts[b"config-epoch"]), node_name(facts[b"ip"].decode(), int(facts[b"port"]))))
        epoch, primary = max(named, key=lambda each: (each[0], sum(one == each for one in named)))
        if epoch < self._epoch and self.only is not None:
            log.warning("%s: only Sentinels that know of an older failover answer", self._where.place)
            return
        self._epoch = epoch
        self.only = primary

    def _ask_all(self, nodes: Iterable[str], *commands: tuple[bytes, ...], sentinel: bool = False) -> dict[str, Any]:
        """What each says that answers within a second. Raises the last error if none does."""
        asked = sorted(set(nodes))
        answers: dict[str, Any] = {}
        last: StateError = WarmUnavailable(f"{self._where.place}: nobody to ask")
        pool = ThreadPoolExecutor(max_workers=min(len(asked), 16), thread_name_prefix="distributed-state-look")
        quick = min(_QUICK, self._timeout)
        try:
            ask = partial(self._ask, timeout=quick, sentinel=sentinel)
            waiting = {pool.submit(ask, each, *commands): each for each in asked}
            for done in as_completed(waiting, timeout=2 * quick):
                try:
                    answers[waiting[done]] = done.result()
                except StateError as error:
                    last = error
        except TimeoutError:
            log.debug("%s: not all answered", self._where.place)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if not answers:
            raise last
        return answers


def _endpoint(node: list[Any], asked: str) -> str:
    """A server as CLUSTER SLOTS names it; one that names no host is where we asked."""
    host = (node[0] or b"").decode()
    return node_name(host if host not in ("", "?") else host_and_port(asked)[0], node[1])


def _config_epochs(nodes: bytes) -> dict[bytes, int]:
    """The config epoch of each server by its id, from CLUSTER NODES."""
    rows = [line.split(b" ") for line in nodes.splitlines() if line]
    return {row[0]: int(row[6]) for row in rows if len(row) > 6}
