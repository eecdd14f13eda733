"""Which server has which key now: the only one, the one that Sentinels name, or one of a cluster's primaries.

Law: a server's report about itself is not enough. A primary that was cut off, together with its Sentinel or a part of
its cluster, still reports that it is a primary. So all servers are asked, and the report with the highest config epoch
decides; a lower epoch never replaces it.

One object for all connections of a store, in any thread or event loop. Asking blocks, so an event loop uses a thread.
Each Sentinel also has a thread that listens to it (`SentinelWatch`): a client whose connections stay open to a primary
that was cut off would otherwise never ask. A message is only a reason to ask.

A replica that is down is still a replica. A primary forgets it when its connection ends; Sentinels and the servers of a
cluster do not, and may promote it when it is back.

Design: sections 14, 19.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import redis.exceptions as driver

from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.port.addresses import Address, host_and_port, node_name
from distributed_state.port.commands import LOST, ONE_OF_A_CLUSTER, ReplyError
from distributed_state.port.identities import KnownReplicas, SentinelAnswer
from distributed_state.port.sockets import Socket

log = logging.getLogger(__name__)
SLOTS = 16384
# The errors of a server that is not of the URL's kind, and how to correct the URL.
_NOT_OF_THIS = ("unknown command", "cluster support disabled")
_OF_ANOTHER_KIND = {
    "sentinel": "this is not a Sentinel: use redis:// for the server itself, redis+cluster:// for a cluster",
    "cluster": "this server is not part of a cluster: use redis:// for a single server, "
    "redis+sentinel:// with Sentinels",
}
_QUICK = 1.0  # seconds for a server to report the other servers
_GRACE = 0.1  # further seconds for the remaining servers when most have answered
_PAUSE = 0.05  # seconds between two looks
_LONGEST = 60.0  # maximum seconds to wait for another thread's look
_SHORTEST = 0.01
_OFTEN = 1.0  # seconds between looks whose only reason is a slot that moved
_EVERY = 1.0  # seconds between two attempts to reach a server that is down
_NEVER = b"nofailover"
# The end of a failover, and the promotion of a replica: in between the old primary takes writes that will be lost.
_SAID = (b"+switch-master", b"+promoted-slave")


def slot_of(key: bytes) -> int:
    """Return the slot of a key, as in the cluster specification."""
    opened = key.find(b"{")
    if opened >= 0:
        closed = key.find(b"}", opened + 1)
        if closed > opened + 1:
            key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


def threads(count: int) -> Executor:
    """Return an executor that asks this many servers at once."""
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="distributed-state-look")


class Topology:
    """Where keys were at the last look.

    `ask` asks one server; `executor(n)` is an executor that asks n servers at once.
    """

    def __init__(
        self,
        address: Address | None,
        timeout: float,
        ask: Callable[..., list[Any]],
        executor: Callable[[int], Executor] = threads,
    ) -> None:
        self._address = address  # None: embedded
        self._timeout = timeout
        self._ask = ask
        self._executor = executor
        self.kind = "embedded" if address is None else address.kind
        """"embedded", "sentinel", "cluster", or "plain": a server that may turn out to be one of a cluster."""
        self.only: str | None = "" if address is None else None
        """The one server that has all keys; None before the first look, and in a cluster."""
        self.unix = address is not None and address.unix
        self.doubted = address is not None
        """Whether to look before the next command."""
        self.looks = 0
        self._slots: list[str] = []
        self._owners: list[str] = []  # the servers in `_slots`, in order
        self._known: set[str] = set()  # servers of a cluster, including replicas: any can be asked
        self._by_tag: dict[bytes, str] = {}
        self._epoch = -1  # config epoch of the primary that Sentinels named last
        self._looked = 0.0
        self._seconds = math.inf  # limit of the present look
        self._looking = threading.Lock()  # held for up to a second: an event loop never waits for it
        self._changing = threading.Lock()
        self._gone: list[Callable[[str], None]] = []

    @property
    def _where(self) -> Address:
        assert self._address is not None, "an embedded server is nowhere else"
        return self._address

    def on_gone(self, drop: Callable[[str], None]) -> None:
        """Register a function that is called, by any thread, with each server that is no longer used."""
        self._gone.append(drop)

    def forget(self, drop: Callable[[str], None]) -> bool:
        """Unregister the function; return whether no function is registered now."""
        with suppress(ValueError):
            self._gone.remove(drop)
        return not self._gone

    @property
    def is_used(self) -> bool:
        """Whether a callback for servers that are gone is registered."""
        return bool(self._gone)

    def inherited(self) -> None:
        """In a forked child: replace locks that a thread of the parent may hold, and doubt the known locations."""
        self._looking, self._changing = threading.Lock(), threading.Lock()
        self.doubt()

    def node_of(self, key: bytes) -> str:
        """Return the server that has a key. Raises WarmUnavailable if none is known to have it."""
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
        """Return all servers that have keys."""
        return [self.only] if self.only is not None else list(self._owners)

    def _has(self, slots: list[str]) -> None:
        self._slots = slots
        self._owners = sorted(set(slots) - {""})
        self._by_tag = {}

    @property
    def several(self) -> bool:
        """Whether one server may answer in place of another: a cluster, or primaries that Sentinels choose."""
        return self.kind in ("sentinel", "cluster")

    def doubt(self) -> None:
        """Look before the next command, because keys may be elsewhere now."""
        # A server that is not part of a cluster cannot report anything new.
        self.doubted = self.several or self.only is None

    def moved(self, slot: int, node: str, answered: str) -> None:
        """Note a slot's server from a redirection.

        `answered` is the redirecting server, whose own host may be omitted.
        """
        node = with_host(node, answered)
        with self._changing:
            if self.kind != "cluster":
                # A plain address that is a server of a cluster, and was not allowed to report it.
                self.kind = "cluster"
                self.only = None
                self.doubted = True
            slots = self._slots or [""] * SLOTS
            slots[slot] = node
            self._known.add(node)
            self._has(slots)
            # If one slot moved, others probably did; but during resharding the result of a look is soon outdated.
            self.doubted = self.doubted or time.monotonic() - self._looked > _OFTEN

    def look(self, seconds: float = math.inf) -> None:
        """Find out where keys are, if that is in doubt; it may take a second, at most `seconds`.

        Raises WarmUnavailable or ConfigurationError.
        """
        began = time.monotonic()
        if not self._looking.acquire(timeout=min(seconds, _LONGEST)):
            raise WarmUnavailable(f"{self._where.place}: the server that has the keys is not known yet")
        try:
            if not self.doubted:
                return  # another thread looked meanwhile
            self._seconds = max(_SHORTEST, seconds - (time.monotonic() - began))
            left = self._looked + _PAUSE - time.monotonic()
            if left > 0:
                time.sleep(left)
            before = self.nodes()
            # Set before looking: other callers continue with the known locations, and a new doubt causes another look.
            self.doubted = not before
            try:
                self._find_out()
                self.doubted = self.doubted and bool(before)
            except StateError as error:
                # The servers that could answer are down. The known locations may still be right, or answer with
                # redirections.
                if not before or not isinstance(error, WarmUnavailable):
                    self.doubted = True
                    raise
                log.info("%s: no server reports which server has which keys: %s", self._where.place, error)
            finally:
                self._looked = time.monotonic()
                self.looks += 1
        finally:
            self._looking.release()
        after = self.nodes()
        for node in before:
            if node not in after:
                log.info("%s: %s is no longer asked; %s", self._where.place, node, ", ".join(after))
                self.drop(node)

    def drop(self, node: str) -> None:
        """Drop all connections to a server."""
        for drop in list(self._gone):
            drop(node)

    def _find_out(self) -> None:
        try:
            if self.kind == "sentinel":
                self._look_at_sentinels()
            elif self.kind == "cluster":
                self._look_at_cluster(self._known | set(self._where.seeds))
            else:
                self._look_at_server()
        except ConfigurationError as error:
            if self.kind in _OF_ANOTHER_KIND and any(words in str(error).lower() for words in _NOT_OF_THIS):
                raise ConfigurationError(f"{self._where.place}: {_OF_ANOTHER_KIND[self.kind]}") from error
            raise

    def _look_at_server(self) -> None:
        """Look at a plain address: a server, or one of a cluster."""
        seed = self._where.seeds[0]
        reply: Any = []
        try:
            (reply,) = self._ask(seed, (b"HELLO",), timeout=min(self._timeout, self._seconds))
        except ConfigurationError as error:
            if "lacks a right" not in str(error) and "unknown command" not in str(error):
                raise
            # Without this right, a cluster is noticed when it answers MOVED.
        pairs = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}
        if pairs.get(b"mode") == b"sentinel":
            raise ConfigurationError(
                f"{self._where.place}: this is a Sentinel: use redis+sentinel:// and the service's name"
            )
        if pairs.get(b"mode") != b"cluster":
            self.only = seed
            return
        if self.unix:
            raise ConfigurationError(f"{self._where.place}: {ONE_OF_A_CLUSTER}")
        if self._where.options.get("db"):
            raise ConfigurationError(f"{self._where.place}: this is a server of a cluster, which has only database 0")
        self.kind = "cluster"
        self._look_at_cluster({seed})

    def _look_at_cluster(self, known: Iterable[str]) -> None:
        claims: list[tuple[int, int, int, str]] = []  # epoch, first slot, last slot, owner
        found: set[str] = set()
        views = self._ask_all(known, (b"CLUSTER", b"SLOTS"), (b"CLUSTER", b"NODES"))
        for asked, (slots, nodes) in views.items():
            epochs = _config_epochs(nodes)
            for first, last, primary, *replicas in slots:
                owner = _endpoint(primary, asked)
                found.update((owner, *(_endpoint(each, asked) for each in replicas)))
                claims.append((epochs.get(primary[2], 0), first, last, owner))
        owners = [""] * SLOTS
        for _, first, last, owner in sorted(claims, key=lambda claim: claim[0]):  # the highest epoch wins
            owners[first : last + 1] = [owner] * (last + 1 - first)
        with self._changing:
            self._known = found
            self._has(owners)

    def _look_at_sentinels(self) -> None:
        """Ask all Sentinels: one that was cut off with the old primary still names it, with an older epoch."""
        service = self._where.service
        named: list[tuple[int, str]] = []
        # Each is asked two questions: in its answer to the first, the Sentinel that leads a failover gives the new
        # epoch with the old primary until all replicas follow the new one, which may take minutes.
        asked = [(b"SENTINEL", word, service.encode()) for word in (b"MASTER", b"GET-MASTER-ADDR-BY-NAME")]
        answers = self._ask_all(self._where.seeds, *asked, sentinel=True)
        for reply, (host, port) in answers.values():
            facts = _pairs(reply)
            named.append((int(facts[b"config-epoch"]), node_name(host.decode(), int(port))))
        epoch, primary = max(named, key=lambda each: (each[0], sum(one == each for one in named)))
        if epoch < self._epoch and self.only is not None:
            log.warning("%s: the only Sentinels that answer do not know the latest failover", self._where.place)
            return
        self._epoch = epoch
        self.only = primary

    def _ask_all(self, nodes: Iterable[str], *commands: tuple[bytes, ...], sentinel: bool = False) -> dict[str, Any]:
        """Return the answers of the servers that answer within a second. Raises the last error if none does."""
        asked = sorted(set(nodes))
        answers: dict[str, Any] = {}
        last: StateError = WarmUnavailable(f"{self._where.place}: no server to ask")
        pool = self._executor(min(len(asked), 16))
        quick = min(_QUICK, self._timeout, self._seconds / 2)  # the look may take twice that
        try:
            ask = partial(self._ask, timeout=quick, sentinel=sentinel)
            waiting = {pool.submit(ask, each, *commands): each for each in asked}
            # Not all answers are awaited: one silent server would delay callers that need keys of the others.
            while waiting:
                enough = 2 * len(answers) > len(asked)
                done, _ = wait(waiting, timeout=_GRACE if enough else 2 * quick, return_when=FIRST_COMPLETED)
                if not done:
                    log.debug("%s: no answer from %s", self._where.place, ", ".join(waiting.values()))
                    break
                for each in [each for each in waiting if each in done]:  # `done` is a set, which has no order
                    node = waiting.pop(each)
                    try:
                        answers[node] = each.result()
                    except StateError as error:
                        last = error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if not answers:
            raise last
        return answers


def with_host(node: str, asked: str) -> str:
    """Return the server that an answer names; without a host it is the server that was asked."""
    host, port = host_and_port(node)
    return node_name(host if host not in ("", "?") else host_and_port(asked)[0], port)


def _endpoint(node: list[Any], asked: str) -> str:
    """Return a server of a reply to CLUSTER SLOTS."""
    return with_host(node_name((node[0] or b"").decode(), node[1]), asked)


def _config_epochs(nodes: bytes) -> dict[bytes, int]:
    """Return the config epoch of each server by its id, from CLUSTER NODES."""
    rows = [line.split(b" ") for line in nodes.splitlines() if line]
    return {row[0]: int(row[6]) for row in rows if len(row) > 6}


def replicas_behind_sentinels(
    seeds: Iterable[str], service: str, primary: str, ask: Callable[..., list[Any]]
) -> KnownReplicas:
    """Return the replicas of a primary that all Sentinels together know: a restarted Sentinel knows fewer.

    Sentinels that know only of an older failover are ignored. Raises WarmUnavailable if the others name another
    primary, because the promoted server is then missing from their lists. Raises the last error if none answers.
    """
    answers: dict[str, tuple[int, str, list[Any]]] = {}
    last: StateError | None = None
    named = service.encode()
    words = [(b"SENTINEL", word, named) for word in (b"MASTER", b"GET-MASTER-ADDR-BY-NAME", b"REPLICAS")]
    for seed in seeds:
        try:
            reply, (host, port), listed = ask(seed, *words, timeout=_QUICK, sentinel=True)
        except StateError as error:
            last = error
        else:
            answers[seed] = (int(_pairs(reply)[b"config-epoch"]), node_name(host.decode(), int(port)), listed)
    if not answers:
        assert last is not None, "a URL of Sentinels names one"
        raise last
    newest = max(epoch for epoch, _, _ in answers.values())
    promotable, others = set[str](), set[str]()
    for epoch, named_primary, listed in answers.values():
        if epoch == newest and named_primary != primary:
            raise WarmUnavailable(f"{primary} is no longer the primary: Sentinels name {named_primary}")
        for each in map(_pairs, listed) if epoch == newest else ():
            name = node_name(each[b"ip"].decode(), int(each[b"port"]))
            (others if each.get(b"slave-priority") == b"0" else promotable).add(name)
    # A Sentinel that leads a failover still lists the new primary among them for a moment.
    return KnownReplicas(frozenset(promotable - {primary}), frozenset(others - promotable))


def replicas_in_cluster(node: str, ask: Callable[..., list[Any]]) -> KnownReplicas:
    """Return the replicas that a primary of a cluster knows. Raises as `ask`."""
    (text,) = ask(node, (b"CLUSTER", b"NODES"), timeout=_QUICK)
    rows = [line.split(b" ") for line in text.splitlines() if line]
    me = next((row[0] for row in rows if b"myself" in row[2].split(b",")), b"")
    mine = [(row[1].partition(b"@")[0].decode(), row[2].split(b",")) for row in rows if len(row) > 3 and row[3] == me]
    promotable = frozenset(name for name, flags in mine if _NEVER not in flags)
    return KnownReplicas(promotable, frozenset(name for name, _ in mine) - promotable)


def _pairs(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def ask_sentinel(node: str, service: str, ask: Callable[..., list[Any]]) -> SentinelAnswer:
    """Ask one Sentinel about a service, and whether it could start a failover now."""
    asked = partial(ask, node, timeout=_QUICK, sentinel=True)
    named = service.encode()
    try:
        reply, (host, port) = asked((b"SENTINEL", b"MASTER", named), (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", named))
    except StateError as error:
        return SentinelAnswer(node, problem=str(error))
    facts = _pairs(reply)
    refused = ""
    try:
        asked((b"SENTINEL", b"CKQUORUM", named))
    except StateError as error:
        refused = str(error)
    primary = node_name(host.decode(), int(port))
    return SentinelAnswer(node, primary, int(facts[b"config-epoch"]), int(facts[b"quorum"]), refused)


class SentinelWatch:
    """Threads that listen to Sentinels while they are needed.

    `connect` makes a connection to one of them, with a timeout of a second for each answer. The threads call `changed`
    whenever the service may have another primary.
    """

    def __init__(
        self, seeds: Sequence[str], service: str, connect: Callable[[str], Socket], changed: Callable[[], None]
    ) -> None:
        self._seeds = seeds
        self._service = service.encode()
        self._connect = connect
        self._changed = changed
        self._mutex = threading.Lock()
        self._listeners: list[_Listener] = []

    def begin(self) -> None:
        """Listen from now on, unless threads of this process already do: they do not survive fork()."""
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
        """In a forked child: replace the lock, which a thread of the parent may hold, and forget its listeners."""
        self._mutex = threading.Lock()
        self._listeners = []

    def _look(self) -> None:
        try:
            self._changed()
        except StateError as error:
            log.warning("the Sentinels cannot be asked: %s", error)


class _Listener(threading.Thread):
    """Listens to one Sentinel, and connects again after a disconnection."""

    def __init__(self, seed: str, service: bytes, connect: Callable[[str], Socket], look: Callable[[], None]) -> None:
        super().__init__(name="distributed-state-sentinel", daemon=True)
        self._seed = seed
        self._service = service
        self._connect = connect
        self._look = look
        self._stopped = threading.Event()
        self._connection: Socket | None = None

    def stop(self) -> None:
        """End the thread now."""
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
                # Nothing came for a second. A connection that was cut off silently never delivers anything again.
                if asked:
                    raise
                connection.send(connection.packer.pack([(b"PING",)]))
                asked = True
            else:
                asked = False
                self._understand(message)

    def _understand(self, message: Any) -> None:
        if isinstance(message, ReplyError):
            log.warning("Sentinel %s refuses the subscription to changes of the primary: %s", self._seed, message)
        # Messages before the subscription were missed, so a look follows it.
        elif message[0] == b"subscribe" or (message[0] == b"message" and self._service in message[2].split(b" ")):
            self._look()
