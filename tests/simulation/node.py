"""One Redis server of a run. Law: it holds what it executed, and its log decides what it can lose.

fakeredis executes the commands, with the real scripts. This module adds a log of all writes and their times. A file or
a replica has the first part of this log, so a restart, a power cut or a promotion leaves an exact state. A replica is a
node, too: it is brought up to date as far as its lag permits when it is read or promoted. INFO, ROLE, CONFIG, WAIT and
WAITAOF are answered from this state.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fakeredis import _msgs as msgs
from fakeredis._commands import COMMANDS_WITH_SUB
from fakeredis._core._database import CommandItem, Item
from fakeredis._helpers import SimpleError
from fakeredis._socket._resp import convert_to_resp2
from fakeredis.commands_mixins import scripting_mixin
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE

from distributed_state.port.commands import ReplyError
from distributed_state.port.embedded import EmbeddedServer
from distributed_state.port.embedded_client import EmbeddedClient
from distributed_state.port.identities import ServerIdentity
from tests.simulation.world import Clock, World

READS = frozenset(
    b"GET HGET HMGET HGETALL HKEYS XRANGE XREVRANGE PING INFO TIME MGET XLEN EXISTS PTTL ZRANGE ZRANGEBYSCORE ZCARD "
    b"LRANGE TYPE PEXPIRETIME SCAN HEXISTS HLEN HSTRLEN ZSCORE PUBSUB SPUBLISH SMEMBERS".split()
)
_SNAPSHOT_EVERY = 150  # entries of the log
_NOW = {b"INFO", b"CONFIG", b"ROLE", b"WAIT", b"WAITAOF"}
_SCRIPTS = (b"EVAL", b"EVALSHA")
_READONLY = "READONLY You can't write against a read only replica."
_NOT_LOCAL = "ERR Script attempted to access a non local key in a cluster node"
LUA_GLOBALS: dict[str, Callable[[], Any]] = {}
"""What a broken script may call beside what Redis offers: see sabotages.py."""


@dataclass(frozen=True, slots=True)
class Persistence:
    """What is in a server's file after the server died: "none", "rdb", "everysec" or "always"."""

    mode: str
    every: float = 1.0  # seconds between two updates of the file


@dataclass(slots=True)
class Link:
    """How a replica follows a primary. `since`: until then it synchronizes, and has its earlier data.

    `data` is the primary's id of its data at the time when the link was made.
    """

    source: Node
    lag: float
    since: float
    data: str
    cut_at: float = math.inf
    floor: float = -math.inf  # the time it had reached when its lag changed

    def is_up(self, now: float) -> bool:
        """Whether the primary counts the replica as attached."""
        return self.since <= now < self.cut_at and not self.source.is_down

    def reached(self, now: float) -> float:
        """The time up to which the replica has the primary's writes; -inf if it never received any."""
        # Writes in transit are lost when the link is cut or the primary dies.
        until = min(now, self.cut_at, self.source.died_at)
        return max(self.floor, until - self.lag) if until >= self.since else -math.inf

    def slow(self, lag: float, now: float) -> None:
        """Set the lag from now on, without removing data that the replica has."""
        self.floor, self.lag = self.reached(now), lag


_signatures: dict[bytes, Any] = {}
_PLAIN = {bytes, int, type(None)}
_OF_NODE = {b"PUBSUB", b"SPUBLISH", b"INFO"}


class Client(EmbeddedClient):
    """A client that compiles a script once for each server, and leaves garbage collection to Lua.

    fakeredis compiles, collects garbage and compares all globals at each call, which takes more time than the rest of a
    run. Tests with real servers check that our scripts leave no globals behind.
    """

    def eval(self, script: bytes, numkeys: int, *rest: bytes) -> Any:
        server = self._server
        runtime = self._get_server_runtime(server)
        functions: dict[bytes, tuple[Any, bytes]] = vars(server).setdefault("functions", {})
        if script not in functions:
            for name, call in LUA_GLOBALS.items():
                runtime.globals()[name.encode()] = call
            sha = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
            functions[script] = runtime.compile(script), sha
            vars(server).setdefault("scripts", {})[sha] = script
        function, sha = functions[script]
        server.script_cache[sha] = script  # even if the script had been removed from the cache
        server._lua_current_socket[0] = self
        server._lua_set_keys_argv(runtime.table_from(rest[:numkeys]), runtime.table_from(rest[numkeys:]))
        self._script_resp = 2
        try:
            result = function()
        except LUA_MODULE.LuaError as error:
            raise SimpleError(f"ERR {error}") from error
        finally:
            self._script_resp = None
        return self._convert_lua_result(result, nested=False)

    def _lua_redis_call(self, runtime: Any, expected: Any, op: bytes, *args: Any) -> Any:
        server: Any = self._server
        server.calls += 1
        # A real server logs the effects of a script. This one runs it again, so it must get the same answers again.
        said: deque[Any] = server.said
        if op not in _OF_NODE:
            if server.refuses and op not in READS:
                raise SimpleError(server.refuses)
            if server.is_replaying:
                lacks = bool(said) and said[0] == (server.calls,)
                if lacks:
                    said.popleft()
            elif lacks := server.lacks(op, args):
                said.append((server.calls,))
            if lacks:
                raise SimpleError(_NOT_LOCAL)
            return self._called(runtime, expected, op, *args)
        if server.is_replaying:
            return self._convert_redis_result(runtime, said.popleft())
        if op == b"INFO":
            said.append(server.info())
            return said[-1]
        answer = self._called(runtime, expected, op, *args)
        said.append(answer if isinstance(answer, int) else list(answer.values()))
        return answer

    def _lua_redis_pcall(self, runtime: Any, expected: Any, op: bytes, *args: Any) -> Any:
        try:
            return self._lua_redis_call(runtime, expected, op, *args)
        except SimpleError as error:
            return runtime.table_from({b"err": error.value.encode()})

    def _called(self, runtime: Any, expected: Any, op: bytes, *args: Any) -> Any:
        signature = _signatures.get(op)
        if signature is None:
            name = op.decode().lower()
            if name in COMMANDS_WITH_SUB:
                return super()._lua_redis_call(runtime, expected, op, *args)
            signature = _signatures[op] = self._name_to_func(name)[1]
        words = [word if type(word) is bytes else scripting_mixin._convert_redis_arg(word) for word in args]
        result = self._run_command(getattr(self, signature.func_name), signature, words, True)
        return self._convert_redis_result(runtime, result)

    def _run_command(self, func: Any, signature: Any, args: list[Any], from_script: bool) -> Any:
        """Like the method of fakeredis, without unused features: keyspace notifications and checks of answers."""
        items: list[CommandItem] = []
        self._subkey_events = []
        try:
            ready = signature.apply(args, self._db, self.version)
            if len(ready) == 1:
                result = ready[0]
            else:
                words, items = ready
                result = func(*words)
                if type(result) not in _PLAIN:
                    result = convert_to_resp2(result)
        except SimpleError as error:
            result = error
        for item in items:
            item.writeback(remove_empty_val=msgs.FLAG_LEAVE_EMPTY_VAL not in signature.flags)
        return result


def _has_run(words: Sequence[Any], refused: ReplyError) -> bool:
    """Whether a command that returned an error may have changed data, as a script does before it fails."""
    return words[0] in (b"EVAL", b"EVALSHA") and refused.word != "NOSCRIPT"


class Node(EmbeddedServer):
    """A server, called in process. `identity`: the ids that INFO reports for its data and process."""

    def __init__(self, world: World, name: str, identity: ServerIdentity, persistence: Persistence) -> None:
        super().__init__()
        self._client = Client
        self.world, self.name, self.identity = world, name, identity
        self.persistence = persistence
        self.fake.said, self.fake.calls, self.fake.is_replaying, self.fake.refuses = deque(), 0, False, ""
        self.fake.info, self.fake.lacks = self._info, self._lacks
        self.clock = Clock(world)
        self.born = world.now if world.now > 0 else -3600.0
        self.link: Link | None = None  # of a replica
        self.followers: dict[Node, None] = {}
        self.least = 0  # number of replicas without which it rejects writes
        self.is_down = False
        self.died_at = math.inf
        self.frozen_until = 0.0
        self.connections: dict[Any, None] = {}
        self.log: list[tuple[float, list[Any], tuple[Any, ...], Clock]] = []
        """When what was written, what its scripts were told by the outside, and the clock by which they ran."""
        self._snapshots: list[tuple[int, bytes]] = []
        self._order: dict[Any, int] = {}
        self._times: list[float] = []
        self.member: Any = None  # its view of its cluster, if it is in one: see cluster.py

    # Commands

    def answer(self, commands: Sequence[Any]) -> list[Any]:
        """The answers to commands that arrived over a connection."""
        answers: list[Any] = (self.carry_out if self.member is None else self.member.answer)(commands)
        return answers

    def carry_out(self, commands: Sequence[Any]) -> list[Any]:
        """The answers to these commands, or errors in their place; for WAIT and WAITAOF the word: they end later."""
        world, now = self.world, self.world.now
        self.fake.refuses = self._refuses()
        if self.link is not None and self.catch_up():
            # A replica reads at the time it has reached: now, it would expire keys to which the primary still wrote.
            world.now = self.link.reached(now)
        world.server_clock = self.clock
        try:
            answers: list[Any] = []
            run: list[Any] = []
            for words in commands:
                if words[0] in _NOW or (self.fake.refuses and words[0] not in READS and words[0] not in _SCRIPTS):
                    answers += self._written(run)
                    run = []
                    answers.append(self._said(words) if words[0] in _NOW else ReplyError(self.fake.refuses))
                else:
                    run.append(words)
            return answers + self._written(run)
        finally:
            world.now, world.server_clock = now, None

    def _refuses(self) -> str:
        """The error with which it rejects a write, or ""."""
        if self.link is not None:
            return _READONLY
        return "NOREPLICAS Not enough good replicas to write." if len(self.attached()) < self.least else ""

    def _written(self, commands: list[Any]) -> list[Any]:
        if not commands:
            return []
        said = self.fake.said
        self.fake.calls = 0
        if not self.fake.is_replaying:
            said.clear()
        answers = self.exchange(commands)
        writes = [
            words for words, answer in zip(commands, answers, strict=True)
            if words[0] not in READS and (not isinstance(answer, ReplyError) or _has_run(words, answer))
        ]  # fmt: skip
        if writes and not self.fake.is_replaying and not self.fake.refuses:
            self._note((self.world.now, writes, tuple(said), self.clock))
        return answers

    def _lacks(self, op: bytes, args: Sequence[Any]) -> bool:
        """Whether a script may not name these keys, as their slot leaves this node and not all of them are here."""
        return self.member is not None and bool(self.member.migrating) and self.member.lacks((op, *args))

    def _note(self, entry: tuple[float, list[Any], tuple[Any, ...], Clock]) -> None:
        self.log.append(entry)
        self._times.append(entry[0])
        if len(self.log) % _SNAPSHOT_EVERY == 0 and (not self._snapshots or self._snapshots[-1][0] < len(self.log)):
            self._snapshots.append((len(self.log), self._photograph()))

    def _said(self, words: Sequence[Any]) -> Any:
        if words[0] == b"INFO":
            return self._info()
        if words[0] == b"ROLE":
            if self.link is not None:
                host, _, port = self.link.source.name.rpartition(":")
                return [b"slave", host.encode(), int(port), b"connected", 0]
            return [b"master", 0, []]
        if words[0] == b"CONFIG" and words[1] == b"GET":
            always = b"always" if self.persistence.mode == "always" else b"everysec"
            append = b"yes" if self.persistence.mode in ("always", "everysec") else b"no"
            known = {b"appendonly": append, b"appendfsync": always, b"no-appendfsync-on-rewrite": b"no"}
            return [each for name in words[2:] if name in known for each in (name, known[name])]
        if words[0] in (b"WAIT", b"WAITAOF") and self.link is not None:
            return ReplyError(f"ERR {words[0].decode()} cannot be used with replica instances.")
        if words[0] == b"WAITAOF" and int(words[1]) and self.persistence.mode not in ("always", "everysec"):
            return ReplyError("ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.")
        return words[0]

    def _info(self) -> bytes:
        role = "master"
        if self.link is not None:
            host, _, port = self.link.source.name.rpartition(":")
            role = f"slave\r\nmaster_host:{host}\r\nmaster_port:{port}"
        lines = [
            "redis_version:7.4.0", "maxmemory_policy:volatile-lru", "maxmemory:0", "used_memory:1000000",
            f"aof_enabled:{int(self.persistence.mode in ('always', 'everysec'))}", "maxclients:10000",
            "connected_clients:10", f"role:{role}", f"master_replid:{self.identity.data:0<40}",
            f"master_replid2:{self.identity.former or '':0<40}", f"run_id:{self.identity.process:0<40}",
        ]  # fmt: skip
        lines.append(f"uptime_in_seconds:{int(self.world.now - self.born)}")
        attached = self.attached()
        lines.append(f"connected_slaves:{len(attached)}")
        for at, each in enumerate(attached):
            host, _, port = each.name.rpartition(":")
            lines.append(f"slave{at}:ip={host},port={port},state=online")
        return "\r\n".join(lines).encode()

    # Replicas

    def attached(self) -> list[Node]:
        """The replicas that follow it now."""
        now = self.world.now
        return [each for each in self.followers if each.link is not None and each.link.is_up(now) and not each.is_down]

    def replicas_with(self, written: float) -> int:
        """How many replicas have what was written up to that time, as far as it knows."""
        now = self.world.now
        return sum(
            each.link is not None and each.link.reached(now) >= written and each.frozen_until <= now
            for each in self.attached()
        )

    def follow(self, source: Node, lag: float, since: float) -> None:
        """Become a replica: keep the present data until `since`, then follow with this lag in seconds."""
        self.leave()
        self.link = Link(source, lag, since, source.identity.data)
        self.identity = ServerIdentity(self.identity.data, self.identity.process, False, self.identity.former)
        source.followers[self] = None

    def leave(self) -> None:
        """Stop following, with the data it has by now and the id of that data."""
        if (link := self.link) is not None:
            self.catch_up()
            link.source.followers.pop(self, None)
            self.link = None

    def promote(self, data: str) -> None:
        """Become the primary, with the data it has by now."""
        self.leave()
        self.identity = ServerIdentity(data, self.identity.process, True, self.identity.data)
        for each in list(self.followers):
            assert each.link is not None, "a follower follows"
            each.follow(self, each.link.lag, self.world.now)  # under the new id

    def catch_up(self) -> bool:
        """Update a replica as far as its lag permits; False if it never received anything from its primary."""
        if (link := self.link) is None or (until := link.reached(self.world.now)) < 0:
            return False
        self.identity = ServerIdentity(link.data, self.identity.process, False)
        self.copy(link.source, until)
        return True

    # What is kept elsewhere

    def is_on_disk(self, written: float) -> bool:
        """Whether the file has what was written up to that time."""
        return self.kept_until(self.world.now) >= written

    def kept_until(self, now: float) -> float:
        """The time up to which the file would have the writes if the power failed now."""
        if self.persistence.mode == "always":
            return now
        if self.persistence.mode == "none":
            return -1.0
        return now - now % self.persistence.every

    def rebuilt(self, until: float, identity: ServerIdentity) -> Node:
        """A new server with this one's log up to that time: started from its file, or a promoted replica."""
        made = Node(self.world, self.name, identity, self.persistence)
        made.clock = self.clock
        made.least = self.least
        made.copy(self, until)
        return made

    def copy(self, source: Node, until: float) -> None:
        """Take over another server's log up to that time; if this one already has more of it, keep it."""
        have = len(self.log)
        count = bisect.bisect_right(source._times, until)
        if have and (have > len(source.log) or self.log[-1] is not source.log[have - 1]):
            have = 0  # a different history: replace all of it
            self._develop(b"")
            self._snapshots.clear()
        elif have >= count:
            return
        begin = have
        for at, picture in source._snapshots:
            if begin < at <= count:
                begin = at
                self._snapshots.append((at, picture))
        if begin > have:
            self._develop(self._snapshots[-1][1])
        self.log, self._times = source.log[:begin], source._times[:begin]
        # A script may have been called for the first time before the snapshot.
        known, fake = dict(self.fake.script_cache), vars(self.fake)
        scripts = fake["scripts"] = {**fake.get("scripts", {}), **vars(source.fake).get("scripts", {})}
        self.fake.script_cache.update(scripts)
        self._replay(source.log[begin:count])
        self.fake.script_cache.clear()
        self.fake.script_cache.update(known)

    def _replay(self, entries: Sequence[tuple[float, list[Any], tuple[Any, ...], Clock]]) -> None:
        world = self.world
        now, clock = world.now, world.server_clock
        self.fake.is_replaying, self.fake.refuses = True, ""
        try:
            for entry in entries:
                # Scripts ask for TIME, and expiry depends on the clock.
                world.now, commands, said, world.server_clock = entry
                self.fake.said.clear()
                self.fake.said.extend(said)
                self._written(commands)
                self._note(entry)
        finally:
            world.now, world.server_clock = now, clock
            self.fake.is_replaying = False

    def _photograph(self) -> bytes:
        return pickle.dumps({key: (item.value, item.expireat) for key, item in self.fake.dbs[0]._dict.items()})

    def _develop(self, picture: bytes) -> None:
        database = self.fake.dbs[0]
        database._dict.clear()
        for key, (value, expireat) in (pickle.loads(picture) if picture else {}).items():
            item = Item(value)
            item.expireat = expireat
            database._dict[key] = item
            database.schedule_expiry(key, expireat)

    def mortal_keys(self) -> list[bytes]:
        """The keys with a time to live, which a full server may evict."""
        self.catch_up()
        database = self.fake.dbs[0]
        return sorted(key for key, item in database._dict.items() if item.expireat is not None)

    def contents(self) -> list[bytes]:
        """Every key and value, as stored."""
        self.catch_up()
        return [pickle.dumps((key, item.value)) for key, item in sorted(self.fake.dbs[0]._dict.items())]

    def present(self) -> list[bytes]:
        """All keys that have not expired, in sorted order."""
        self.catch_up()
        keys = sorted(self.fake.dbs[0]._dict)
        return [
            key for key, there in zip(keys, self.carry_out([(b"EXISTS", key) for key in keys]), strict=True) if there
        ]

    # Subscriptions

    def subscribe(self, deliver: Callable[[list[Any]], None]) -> Any:
        made = super().subscribe(deliver)
        self._order[made] = len(self._order)
        return made

    def end_subscriptions(self, is_over: Callable[[bytes], bool]) -> None:
        """End the subscriptions to channels of slots that have moved, and notify subscribers, as a real node does."""
        for channel in sorted(filter(is_over, self.fake.ssubscribers)):
            listening = self.fake.ssubscribers.get(channel, ())
            for subscription in [each for each in self._order if each._client in listening]:
                subscription.post(b"SUNSUBSCRIBE", channel)

    def deliver(self) -> None:
        # fakeredis publishes to a set of sockets, whose order depends on their addresses in memory.
        if len(self._outbox) > 1:
            self._outbox = deque(sorted(self._outbox, key=lambda each: self._order[each[0]]))
        super().deliver()
