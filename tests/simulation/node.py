"""One Redis server of a run. Law: what it holds is what it carried out, and what it can lose is what its log says.

The commands are carried out by fakeredis, the scripts are the real ones. Around it are modelled: a log of what was
written and when, of which a file and each replica have a beginning; so a restart or a power cut leaves an exact state.
INFO, CONFIG, WAIT and WAITAOF are answered from that.
"""

from __future__ import annotations

import bisect
import hashlib
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

from distributed_state.port.embedded import EmbeddedServer
from distributed_state.port.embedded_client import EmbeddedClient
from distributed_state.port.errors import ReplyError
from distributed_state.port.facts import Life
from tests.simulation.world import Clock, World

READS = frozenset(
    b"GET HGET HMGET HGETALL HKEYS XRANGE XREVRANGE PING INFO TIME MGET XLEN EXISTS PTTL ZRANGE ZRANGEBYSCORE ZCARD "
    b"LRANGE TYPE PEXPIRETIME SCAN".split()
)
_SNAPSHOT_EVERY = 150  # entries of the log
_NOW = {b"INFO", b"CONFIG", b"ROLE", b"WAIT", b"WAITAOF"}
LUA_GLOBALS: dict[str, Callable[[], Any]] = {}
"""What a broken script may call beside what Redis offers: see sabotages.py."""


@dataclass(frozen=True, slots=True)
class Persistence:
    """What a server's file has after it died: "none", "rdb", "everysec" or "always"."""

    mode: str
    every: float = 1.0  # seconds between two times that the file is brought up to date


@dataclass(slots=True)
class Replica:
    """A copy of a node that follows it `lag` seconds behind, while it is attached."""

    name: str
    lag: float
    is_attached: bool = True
    stopped_at: float = 0.0

    def reached(self, now: float) -> float:
        """The time up to which it has what the primary wrote."""
        return (now if self.is_attached else self.stopped_at) - self.lag


_signatures: dict[bytes, Any] = {}
_PLAIN = {bytes, int, type(None)}
_OF_SUBSCRIBERS = {b"PUBSUB", b"SPUBLISH"}


class Client(EmbeddedClient):
    """A client whose scripts are compiled once a server, and which leaves it to Lua when to collect garbage.

    fakeredis compiles, collects and compares all globals at each call, which takes more time than all the rest of a
    run. That our scripts leave no globals behind is tested on real servers.
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
        server.script_cache[sha] = script  # also after it was forgotten
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
        if op not in _OF_SUBSCRIBERS:
            return self._called(runtime, expected, op, *args)
        # A real server logs what a script did. This one runs it again, so it must hear the same of its subscribers.
        said: deque[Any] = self._server.said
        if self._server.is_replaying:
            return self._convert_redis_result(runtime, said.popleft())
        answer = self._called(runtime, expected, op, *args)
        said.append(answer if isinstance(answer, int) else list(answer.values()))
        return answer

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
        """As fakeredis' own, without what nobody here asks for: keyspace notifications and checks of its answers."""
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
    """Whether a command that is answered by an error may have changed something: a script up to there."""
    return words[0] in (b"EVAL", b"EVALSHA") and refused.word != "NOSCRIPT"


class Node(EmbeddedServer):
    """A server, called in process. `life` is what INFO says of its data."""

    def __init__(self, world: World, name: str, life: Life, persistence: Persistence, replicas: list[Replica]) -> None:
        super().__init__()
        self._client = Client
        self.fake.said, self.fake.is_replaying = deque(), False
        self.world, self.name, self.life = world, name, life
        self.persistence, self.replicas = persistence, replicas
        self.clock = Clock(world)
        self.is_down = False
        self.frozen_until = 0.0
        self.connections: dict[Any, None] = {}
        self.log: list[tuple[float, list[Any], tuple[Any, ...]]] = []
        """When what was written, and what its scripts were told of subscribers."""
        self._snapshots: list[tuple[int, bytes]] = []
        self._order: dict[Any, int] = {}
        self._times: list[float] = []

    # Commands

    def carry_out(self, commands: Sequence[Any]) -> list[Any]:
        """The answers to these, an error in its place; of WAIT and WAITAOF the word itself, to be answered later."""
        self.world.server_clock = self.clock
        try:
            answers: list[Any] = []
            run: list[Any] = []
            for words in commands:
                if words[0] in _NOW:
                    answers += self._written(run)
                    run = []
                    answers.append(self._said(words))
                else:
                    run.append(words)
            return answers + self._written(run)
        finally:
            self.world.server_clock = None

    def _written(self, commands: list[Any]) -> list[Any]:
        if not commands:
            return []
        said = self.fake.said
        if not self.fake.is_replaying:
            said.clear()
        answers = self.exchange(commands)
        writes = [
            words for words, answer in zip(commands, answers, strict=True)
            if words[0] not in READS and (not isinstance(answer, ReplyError) or _has_run(words, answer))
        ]  # fmt: skip
        if writes:
            self.log.append((self.world.now, writes, () if self.fake.is_replaying else tuple(said)))
            self._times.append(self.world.now)
            if len(self.log) % _SNAPSHOT_EVERY == 0:
                self._snapshots.append((len(self.log), self._photograph()))
        return answers

    def _said(self, words: Sequence[Any]) -> Any:
        if words[0] == b"INFO":
            return self._info()
        if words[0] == b"ROLE":
            return [b"master", 0, []]
        if words[0] == b"CONFIG" and words[1] == b"GET":
            always = b"always" if self.persistence.mode == "always" else b"everysec"
            append = b"yes" if self.persistence.mode in ("always", "everysec") else b"no"
            known = {b"appendonly": append, b"appendfsync": always, b"no-appendfsync-on-rewrite": b"no"}
            return [each for name in words[2:] if name in known for each in (name, known[name])]
        if words[0] == b"WAITAOF" and int(words[1]) and self.persistence.mode not in ("always", "everysec"):
            return ReplyError("ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.")
        return words[0]

    def _info(self) -> bytes:
        attached = [each for each in self.replicas if each.is_attached]
        lines = [
            "redis_version:7.4.0", "maxmemory_policy:volatile-lru", "maxmemory:0", "used_memory:1000000",
            f"aof_enabled:{int(self.persistence.mode in ('always', 'everysec'))}", "maxclients:10000",
            "connected_clients:10", "role:master", f"master_replid:{self.life.data:0<40}",
            f"master_replid2:{self.life.former or '':0<40}", f"run_id:{self.life.process:0<40}",
            f"connected_slaves:{len(attached)}",
        ]  # fmt: skip
        lines += [f"slave{at}:ip={each.name},port=6379,state=online" for at, each in enumerate(attached)]
        return "\r\n".join(lines).encode()

    # What is kept elsewhere

    def replicas_with(self, written: float) -> int:
        """How many replicas have what was written up to then."""
        return sum(each.is_attached and each.reached(self.world.now) >= written for each in self.replicas)

    def is_on_disk(self, written: float) -> bool:
        """Whether the file has what was written up to then."""
        return self.kept_until(self.world.now) >= written

    def kept_until(self, now: float) -> float:
        """The time up to which the file has what was written, should the power fail now."""
        if self.persistence.mode == "always":
            return now
        if self.persistence.mode == "none":
            return -1.0
        return now - now % self.persistence.every

    def rebuilt(self, until: float, life: Life) -> Node:
        """Another server with what this one had logged by then: started from its file, or a promoted replica."""
        made = Node(self.world, self.name, life, self.persistence, self.replicas)
        made.clock = self.clock
        count = bisect.bisect_right(self._times, until)
        begin = 0
        for at, picture in self._snapshots:
            if at <= count:
                begin = at
                made._develop(picture)
                made._snapshots.append((at, picture))
        made.log, made._times = self.log[:begin], self._times[:begin]
        # What stands before the picture may have been the first call of a script.
        scripts = vars(made.fake)["scripts"] = dict(vars(self.fake).get("scripts", {}))
        made.fake.script_cache.update(scripts)
        now = self.world.now
        made.fake.is_replaying = True
        try:
            for entry in self.log[begin:count]:
                self.world.now, commands, said = entry  # scripts ask for TIME, and expiry is by the clock
                made.fake.said.extend(said)
                made.carry_out(commands)
                made.log[-1] = entry
        finally:
            self.world.now = now
            made.fake.is_replaying = False
        made.fake.script_cache.clear()
        return made

    def _photograph(self) -> bytes:
        return pickle.dumps({key: (item.value, item.expireat) for key, item in self.fake.dbs[0]._dict.items()})

    def _develop(self, picture: bytes) -> None:
        database = self.fake.dbs[0]
        database._dict.clear()
        for key, (value, expireat) in pickle.loads(picture).items():
            item = Item(value)
            item.expireat = expireat
            database._dict[key] = item
            database.schedule_expiry(key, expireat)

    def mortal_keys(self) -> list[bytes]:
        """The keys with a time to live, which a server that is full may evict."""
        database = self.fake.dbs[0]
        return sorted(key for key, item in database._dict.items() if item.expireat is not None)

    def contents(self) -> list[bytes]:
        """Every key and value, as they are kept."""
        return [pickle.dumps((key, item.value)) for key, item in sorted(self.fake.dbs[0]._dict.items())]

    def present(self) -> list[bytes]:
        """All keys that have not expired, in order."""
        keys = sorted(self.fake.dbs[0]._dict)
        return [
            key for key, there in zip(keys, self.carry_out([(b"EXISTS", key) for key in keys]), strict=True) if there
        ]

    # Subscriptions

    def subscribe(self, deliver: Callable[[list[Any]], None]) -> Any:
        made = super().subscribe(deliver)
        self._order[made] = len(self._order)
        return made

    def deliver(self) -> None:
        # fakeredis publishes to a set of sockets that is ordered by their addresses in memory.
        if len(self._outbox) > 1:
            self._outbox = deque(sorted(self._outbox, key=lambda each: self._order[each[0]]))
        super().deliver()
