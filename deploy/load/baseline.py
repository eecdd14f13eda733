"""What bare redis-py reaches with the same commands. Law: no command is written by hand: a turn is watched.

MONITOR shows what the server executed for one turn, inside of scripts too. That is made into scripts of nothing but
these commands, which as many processes of bare redis-py run as there are workers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import signal
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from hiredis import pack_command

from distributed_state import AsyncStateStore, StateStore

SESSIONS = 200
TASKS = 32
_START = 60.0
WATCHED = "watched"
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Pace:
    """Turns a second of all processes, and microseconds of CPU that a turn takes of its process."""

    turns: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Trip:
    """One call of a script: how many keys it has, its other words as they were sent, and the script."""

    keys: int
    words: tuple[bytes, ...]
    script: str

    def names(self, id: str) -> list[str]:
        """Its keys for a conversation."""
        return [f"{{bare-{id}}}:{len(self.script)}:{key}" for key in range(self.keys)]


@dataclass(frozen=True, slots=True)
class Commands:
    """The scripts that begin a conversation, and those of one turn in its middle."""

    create: list[Trip]
    turn: list[Trip]

    @property
    def count(self) -> int:
        """How many commands a turn is."""
        return sum(trip.script.count("redis.call(") for trip in self.turn)


def turn(session: Any, number: int, messages: Messages) -> None:
    """What the service does for a turn, without HTTP."""
    with session.turn(request_id=f"r{number}") as now:
        taken(now, number, messages)


def taken(now: Any, number: int, messages: Messages) -> None:
    """What the service does in a turn."""
    now.append(*messages)
    now.update({"turn": f"c:{number}"})
    now.outcome = {"version": now.version + 1, "phase": now.phase}


def login(url: str) -> bytes:
    """The command that says a URL's password, which the server answers; nothing if it has none."""
    password = urlsplit(url).password
    return pack_command(("AUTH", unquote(password))) if password else b""


def watched(url: str, act: Callable[[], None]) -> list[tuple[list[bytes], list[list[bytes]]]]:
    """The scripts that are called in our namespace while `act` runs, with their words and the commands executed."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 6379), timeout=5) as watch:
        watch.sendall(login(url) + b"MONITOR\r\n")
        lines = watch.makefile("rb")
        for _ in range(2 if login(url) else 1):
            lines.readline()
        act()
        marker = f"end-{time.monotonic_ns()}"
        with redis.Redis.from_url(url) as client:
            client.echo(marker)
        calls: list[tuple[list[bytes], list[list[bytes]]]] = []
        for line in lines:
            words = [_unescaped(word) for word in _WORD.findall(line)]
            if marker.encode() in words:
                # A fleet works beside us.
                return [call for call in calls if _is_watched(call[0])]
            if b" lua] " in line[:60]:
                if calls:  # else it is of a call of before
                    calls[-1][1].append(words)
            elif words and words[0].upper() == b"EVALSHA":
                calls.append((words, []))
            elif words and words[0].upper() == b"EVAL" and not _is_watched(words):
                calls.append((words, []))  # a probe of others; one of ours repeats an EVALSHA, whose it is
    raise RuntimeError("the server stopped telling what it executes")


def _is_watched(words: list[bytes]) -> bool:
    return any(word.startswith(WATCHED.encode()) for word in words)


def commands(url: str, messages: Messages) -> Commands:
    """What the library sends."""
    # Another namespace each time: one that an archive which is no more belonged to would not be taken over.
    namespace = f"{WATCHED}-{time.time_ns()}"
    with StateStore.open(url, archive="memory", namespace=namespace, archiver=False, beat=0) as store:
        session = store.session("watched")
        for number in range(3):
            turn(session, number, messages)
        turns = watched(url, lambda: turn(session, 3, messages))
        created = watched(url, lambda: store.session().create({}))
    # The last one: before it the partition may have had to be started.
    return Commands([_trip(*call) for call in created[-1:]], [_trip(*call) for call in turns])


def _trip(words: list[bytes], commands: list[list[bytes]]) -> Trip:
    count = int(words[2])
    keys = words[3 : 3 + count]
    others = words[3 + count :]
    lines = []
    for command in commands:
        shown = [_shown(word, keys, others) for word in command]
        if command[0].upper() == b"XADD":
            shown[2] = "'*'"  # an id is not given twice
        lines.append(f"redis.call({', '.join(shown)})")
    return Trip(len(keys), tuple(others), "\n".join([*lines, "return 'ok'"]))


def _shown(word: bytes, keys: list[bytes], others: list[bytes]) -> str:
    for name, words in ("KEYS", keys), ("ARGV", others):
        if len(word) > 1 and word in words:
            return f"{name}[{words.index(word) + 1}]"
    return _quoted(word)


def _quoted(word: bytes) -> str:
    return (
        "'" + "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\{byte:03d}" for byte in word) + "'"
    )


def _unescaped(word: bytes) -> bytes:
    return word.decode("unicode_escape").encode("latin-1")


def rounds_of(found: list[Trip]) -> list[list[Trip]]:
    """What is sent together: a turn takes its lock and reads in one round trip, commits and gives back in another."""
    commit = next(at for at, trip in enumerate(found) if "'XADD'" in trip.script)
    return [each for each in (found[:commit], found[commit:]) if each]


Rounds = list[list[tuple[str, Trip]]]


def loaded(client: redis.Redis, found: Commands) -> Rounds:
    """A turn's scripts, loaded, with their digests, by what is sent together."""
    return [[(client.script_load(trip.script), trip) for trip in trips] for trips in rounds_of(found.turn)]


def bare_turn(client: redis.Redis, together: Rounds, id: str) -> None:
    """One turn of bare redis-py."""
    for trips in together:
        with client.pipeline(transaction=False) as pipe:
            for sha, trip in trips:
                pipe.evalsha(sha, trip.keys, *trip.names(id), *trip.words)
            pipe.execute()


def _blocking(url: str, process: int, found: Commands, seconds: float, barrier: Any) -> tuple[int, float]:
    """Turns of bare redis-py, one after the other."""
    client = redis.Redis.from_url(url)
    together = loaded(client, found)
    barrier.wait()
    end = time.monotonic() + seconds
    used = time.process_time()
    number = 0
    while time.monotonic() < end:
        number += 1
        bare_turn(client, together, f"{process}-{number % SESSIONS}")
    return number, time.process_time() - used


def _asyncio(url: str, process: int, found: Commands, seconds: float, barrier: Any) -> tuple[int, float]:
    """Turns of bare redis-py, several at a time."""

    async def run() -> tuple[int, float]:
        client = redis.asyncio.Redis.from_url(url)
        shas = {trip.script: await client.script_load(trip.script) for trip in found.turn}
        together = rounds_of(found.turn)

        async def one(number: int) -> None:
            for trips in together:
                async with client.pipeline(transaction=False) as pipe:
                    for trip in trips:
                        names = trip.names(f"{process}-{number % SESSIONS}")
                        pipe.evalsha(shas[trip.script], trip.keys, *names, *trip.words)
                    await pipe.execute()

        done = await _several(one, seconds, barrier)
        await client.aclose()
        return done

    return asyncio.run(run())


def _library(url: str, process: int, messages: Messages, seconds: float, barrier: Any) -> tuple[int, float]:
    """Turns of the library, several at a time, as a worker has them."""

    async def run() -> tuple[int, float]:
        # Nobody archives it, as nobody archives what the bare processes write.
        given: dict[str, Any] = {"archive": "memory", "archiver": False}
        namespace = f"library-{time.time_ns()}-{process}"
        async with await AsyncStateStore.open(url, namespace=namespace, **given) as store:
            sessions = [store.session(f"session-{number}") for number in range(SESSIONS)]

            async def one(number: int) -> None:
                async with sessions[number % SESSIONS].turn(request_id=f"r{number}") as now:
                    taken(now, number, messages)

            for number in range(SESSIONS):
                await one(-1 - number)
            return await _several(one, seconds, barrier)

    return asyncio.run(run())


async def _several(one: Callable[[int], Awaitable[None]], seconds: float, barrier: Any) -> tuple[int, float]:
    """Run this for so long, TASKS at a time; how often it was done, and how many seconds of CPU that took."""
    await asyncio.to_thread(barrier.wait)
    numbers = count()
    end = time.monotonic() + seconds
    used = time.process_time()
    done = 0

    async def some() -> None:
        nonlocal done
        while time.monotonic() < end:
            await one(next(numbers))
            done += 1

    await asyncio.gather(*(some() for _ in range(TASKS)))
    return done, time.process_time() - used


def _told(pipe: Any, call: Callable[..., tuple[int, float]], *given: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, who then ends us
    pipe.send(call(*given))
    pipe.close()


def _together(
    processes: int, seconds: float, call: Callable[..., tuple[int, float]], given: Callable[[int], tuple[Any, ...]]
) -> Pace:
    """The pace of so many processes."""
    context = multiprocessing.get_context("spawn")
    # With a time limit: if one of them dies before it gets there, the others do not wait for ever.
    barrier = context.Barrier(processes, timeout=_START)
    pipes = []
    started = []
    try:
        for at in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            started.append(
                context.Process(target=_told, args=(theirs, call, *given(at), seconds, barrier), daemon=True)
            )
            started[-1].start()
            theirs.close()
            pipes.append(ours)
        found = [pipe.recv() for pipe in pipes]
        done = sum(turns for turns, _ in found)
        return Pace(done / seconds, sum(cpu for _, cpu in found) / max(done, 1) * 1e6)
    except EOFError as error:
        raise RuntimeError("a process of the comparison ended before its time") from error
    finally:
        for process in started:
            process.join(5)
            process.kill()
            process.join()


def compared(
    url: str, processes: int, messages: Messages, found: Commands, *, seconds: float = 2.0, rounds: int = 3
) -> dict[str, Pace]:
    """The paces without HTTP, by who takes the turns, in turn, medians."""
    ways: dict[str, tuple[Callable[..., tuple[int, float]], Any]] = {
        "blocking redis-py": (_blocking, found), "redis-py on asyncio": (_asyncio, found),
        "library": (_library, messages),
    }  # fmt: skip
    measured: dict[str, list[Pace]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (call, given) in ways.items():
            taken = _together(processes, seconds, call, lambda at, given=given: (url, at, given))
            measured[name].append(taken)
    return {
        name: Pace(statistics.median(each.turns for each in paces), statistics.median(each.cpu_us for each in paces))
        for name, paces in measured.items()
    }
