"""What living writers remember of a partition, gathered by who recovers it. Law: what was given in time is whole.

Who gathers leaves a request, with a token and the epoch that is asked for, and reads a list to which each replica adds
what it remembers, in pieces, and then its end. A replica hears of requests through its link, and looks for them when
that begins to hear, and several times a second while it does not. So one that says nothing for a while is not there, or
holds still: it counts as silent, and what it remembers comes late. A request lies in one hash of the fleet, and in its
partition, for those who cannot reach the other.

Design: section 14.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed_state.errors import CorruptState, StateError, WarmUnavailable
from distributed_state.port import Job, Port, Words
from distributed_state.tiers.memory import Memory
from distributed_state.values import chance
from distributed_state.values.journal import JournalEntry, pack, pack_entries, unpack, unpack_entries
from distributed_state.values.keys import Keys
from distributed_state.warm.client import Warm
from distributed_state.warm.link import Link

log = logging.getLogger(__name__)
_EVERY = 0.2  # seconds between two looks for requests, while they are not heard
_LOOK = 1.0  # seconds between two looks for what is archived
_KEPT_MS = b"60000"
_PIECE_BYTES = 256 * 1024
_PAGE = 64  # pieces
_PIECE, _END = b"p", b"z"


class Gathered(NamedTuple):
    """What was found: each commit once, by its event, and the replicas that did not answer to the end."""

    entries: list[JournalEntry]
    silent: set[str]


class Gathering:
    """Asks other replicas what they remember, and answers them.

    `active`: this one is on the roll of replicas. `link`: through which requests are heard, None to look for them.
    """

    def __init__(self, port: Port, warm: Warm, keys: Keys, memory: Memory, link: Link | None, *, active: bool) -> None:
        self._port = port
        self._warm = warm
        self._keys = keys
        self._memory = memory
        self._hearing = link if active else None  # nobody waits for the answer of one that is not on the roll
        self._active = active
        self._asked = port.signal()
        self._answered: dict[str, None] = {}
        self._job: Job | None = None

    def begin(self) -> None:
        """Answer from now on, and let go of what is archived, in the background."""
        if self._memory.remembers:
            self._job = self._port.spawn(self._run, "distributed-state-memory")

    async def close(self) -> None:
        """Stop."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    # Who asks

    async def gather(self, partition: int, epoch: str, replicas: Iterable[str], *, silence: float = 0.5) -> Gathered:
        """What this replica and these remember of a partition's commits under an epoch.

        Waits for them while anything comes, and for `silence` seconds without a word. Raises WarmUnavailable.
        """
        found = {entry.event: entry for entry in self._memory.entries(partition, epoch)}
        wanted = set(replicas) - {self._warm.replica}
        if not wanted:
            return Gathered(list(found.values()), wanted)
        token = chance.token_hex(8)
        request = f"{token} {epoch}"
        keys = self._keys
        await self._warm.command(b"SET", keys.partition(partition).gathering, request, b"PX", _KEPT_MS)
        try:
            fleet = [
                (b"HSET", keys.gatherings, partition, request),
                (b"PEXPIRE", keys.gatherings, _KEPT_MS),
                (b"SPUBLISH", keys.gatherings_channel, request),
            ]
            await self._try(fleet)
            wanted -= await self._read(keys.gathered(partition, token), wanted, found, silence)
        finally:
            await self._try([(b"HDEL", keys.gatherings, partition)])
            own = [(b"DEL", keys.partition(partition).gathering), (b"DEL", keys.gathered(partition, token))]
            await self._try(own)
        return Gathered(list(found.values()), wanted)

    async def _try(self, commands: Sequence[Words]) -> None:
        """What may fail: the list of requests lies at one server, and every key ends by itself."""
        try:
            for answer in await self._port.exchange(commands):
                if isinstance(answer, StateError):
                    raise answer
        except StateError as error:
            log.warning("gathering: %s", error)

    async def _read(self, answers: bytes, wanted: set[str], found: dict[str, JournalEntry], silence: float) -> set[str]:
        """Read answers until all have ended or nothing came for so long; those that ended."""
        ended = set[str]()
        broken = set[str]()
        at = 0
        last = self._port.monotonic()
        while wanted - ended - broken:
            pieces = await self._warm.command(b"LRANGE", answers, at, at + _PAGE - 1)
            at += len(pieces)
            for piece in pieces:
                for kind, replica, data in unpack(piece):
                    try:
                        if kind == _END:
                            ended.add(replica.decode())
                        else:
                            found.update((entry.event, entry) for entry in unpack_entries(data))
                    except CorruptState as error:
                        broken.add(replica.decode())
                        log.error("gathering: what replica %s remembers cannot be read: %s", replica.decode(), error)
            now = self._port.monotonic()
            if pieces:
                last = now
            elif now - last > silence:
                break
            else:
                await self._port.sleep(0.01)
        return ended - broken

    # Who answers

    async def _run(self) -> None:
        looked = 0.0
        said = ""
        asked = True
        if self._hearing is not None:
            self._hearing.listen(self._keys.gatherings_channel, lambda *_: self._asked.set())
        while True:
            try:
                if asked or not self._hears():
                    self._asked.clear()
                    await self.answer()
                    asked = False
                now = self._port.monotonic()
                if now - looked >= _LOOK:
                    looked = now
                    await self._memory.look()
                said = ""
            except StateError as error:
                log.log(logging.DEBUG if said else logging.WARNING, "memory: %s", error)
                said = str(error)
            asked = await self._asked.wait(_LOOK if self._hears() and not asked else _EVERY) or asked

    def _hears(self) -> bool:
        return self._hearing is not None and self._hearing.confirmed(self._keys.gatherings_channel)

    async def answer(self) -> None:
        """Answer whoever asks now what this replica remembers."""
        for partition, request in await self._requests():
            token, _, epoch = request.partition(" ")
            if token in self._answered:
                continue
            for piece in self._pieces(self._memory.entries(partition, epoch)):
                await self._push(self._keys.gathered(partition, token), piece)
            # Only now: one that was broken off is begun again, and what comes twice is found once.
            self._answered[token] = None
            while len(self._answered) > 4 * self._keys.partitions:
                del self._answered[next(iter(self._answered))]

    async def _requests(self) -> list[tuple[int, str]]:
        """Who asks, as the fleet's list of requests says, or else the partitions of which anything is remembered."""
        mine = self._memory.partitions()
        if not mine and not self._active:
            return []  # nobody waits for our answer
        try:
            rows = await self._port.command(b"HGETALL", self._keys.gatherings)
            return [(int(rows[at]), rows[at + 1].decode()) for at in range(0, len(rows), 2)]
        except WarmUnavailable:
            if not mine:
                raise
        asked: list[Words] = [(b"GET", self._keys.partition(each).gathering) for each in mine]
        answers: list[Any] = await self._port.exchange(asked)
        return [(each, answer.decode()) for each, answer in zip(mine, answers, strict=True) if type(answer) is bytes]

    def _pieces(self, entries: Sequence[JournalEntry]) -> Iterator[bytes]:
        """What is sent, each piece of a bounded size unless one entry is larger; the last one is the end."""
        some: list[JournalEntry] = []
        size = 0
        replica = self._warm.replica.encode()
        for entry in entries:
            some.append(entry)
            size += len(entry.data) + 200
            if size > _PIECE_BYTES:
                yield pack([(_PIECE, replica, pack_entries(some))])
                some = []
                size = 0
        yield pack([(_PIECE, replica, pack_entries(some)), (_END, replica, b"")])

    async def _push(self, answers: bytes, piece: bytes) -> None:
        for answer in await self._port.exchange([(b"RPUSH", answers, piece), (b"PEXPIRE", answers, _KEPT_MS)]):
            if isinstance(answer, StateError):
                raise answer
