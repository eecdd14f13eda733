"""Commands on their way to servers that are played: grouped, in order, redirected, and never round and round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import redis.exceptions as driver

from distributed_state.errors import ConfigurationError, WarmUnavailable
from distributed_state.port import Script, Words, bodies, topology
from distributed_state.port.addresses import read_address
from distributed_state.port.commands import Packer, ReplyError, translate
from distributed_state.port.identities import ServerIdentity
from distributed_state.port.routing import Router
from distributed_state.port.shared import SharedPort
from distributed_state.port.topology import SLOTS, Topology, slot_of
from distributed_state.port.waited import Limits

pytestmark = pytest.mark.unit

A, B, C = "h:1", "h:2", "h:3"
ONE, TWO = Script("commit"), Script("read")
# A key of each third of the slots, one for each server.
KEYS = {
    node: next(b"k{%d}" % n for n in range(1000) if slot_of(b"{%d}" % n) * 3 // SLOTS == at)
    for at, node in enumerate((A, B, C))
}


class Connections:
    """What a router needs of them."""

    def __init__(self) -> None:
        self.place, self.embedded, self.data_ids = "redis+cluster://h", None, dict[str, str]()
        self.timeout, self.limits = 1.0, Limits(1.0, 1.0, self.place)
        self.topology = Topology(read_address("redis+cluster://h:1"), 1.0, self.ask)

    def ask(self, node: str, *commands: Words, timeout: float, sentinel: bool = False) -> list[Any]:
        rows = [[at * SLOTS // 3, (at + 1) * SLOTS // 3 - 1, [b"h", at + 1, b"i"]] for at in range(3)]
        return [rows if command[1] == b"SLOTS" else b"" for command in commands]


class Played(Router):
    """An API whose servers are functions; `said` is what each exchange said to whom."""

    def __init__(self, answer: Callable[[str, Words], Any] = lambda node, words: b"ok") -> None:
        super().__init__(Connections())  # type: ignore[arg-type]  # played
        self.answer = answer
        self.said: list[dict[str, list[Words]]] = []
        self.looks = 0

    async def look(self) -> None:
        self.looks += 1
        self._topology.look()

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        found = (await self.exchange_with_all({node: list(commands)}))[node]
        if isinstance(found, WarmUnavailable):
            raise found
        return found

    async def exchange_with_all(self, groups: dict[str, list[Words]]) -> dict[str, list[Any] | WarmUnavailable]:
        self.said.append({node: list(commands) for node, commands in groups.items()})
        found: dict[str, list[Any] | WarmUnavailable] = {}
        for node, commands in groups.items():
            try:
                found[node] = [self.answer(node, words) for words in commands]
            except WarmUnavailable as error:
                found[node] = error
        return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_PAUSE", 0)


def get(node: str) -> Words:
    return (b"GET", KEYS[node])


def test_commands_are_grouped_by_server_and_answers_come_in_order() -> None:
    port = Played(lambda node, words: (node, words))
    commands = [get(B), get(A), get(B), get(C), get(A)]
    answers = asyncio.run(port.exchange(commands))
    assert answers == [(words and node, words) for node, words in zip((B, A, B, C, A), commands, strict=True)]
    assert port.said == [{B: [get(B), get(B)], A: [get(A), get(A)], C: [get(C)]}], "one round trip"


def test_a_script_goes_where_its_first_key_is() -> None:
    port = Played(lambda node, words: node)
    for node in (A, B, C):
        assert asyncio.run(port.script(ONE, [KEYS[node], b"k"], [b"a"])) == node
        assert asyncio.run(port.command(*ONE.first_call(ONE.call([KEYS[node]], [])))) == node


def test_what_has_no_key_goes_to_any_server() -> None:
    port = Played(lambda node, words: node)
    assert asyncio.run(port.command(b"PING")) in (A, B, C)


def test_without_any_server_nothing_is_reached() -> None:
    """A cluster that was formed, and has no slots yet."""
    port = Played()
    port._connections.topology._ask = lambda *args, **named: [[], b""]
    with pytest.raises(WarmUnavailable):
        asyncio.run(port.command(b"PING"))
    with pytest.raises(WarmUnavailable):
        asyncio.run(port.command(*get(A)))


def test_moved_is_followed_and_remembered() -> None:
    slot = slot_of(KEYS[A])
    port = Played(lambda node, words: node if node == B else port._refused(node, f"MOVED {slot} {B}"))
    assert asyncio.run(port.command(*get(A))) == B
    assert asyncio.run(port.command(*get(A))) == B
    assert port.said == [{A: [get(A)]}, {B: [get(A)]}, {B: [get(A)]}]


def test_ask_is_followed_once_and_not_remembered() -> None:
    slot = slot_of(KEYS[A])

    def answer(node: str, words: Words) -> Any:
        return node if node == B else port._refused(node, f"ASK {slot} {B}")

    port = Played(answer)
    for _ in range(2):
        assert asyncio.run(port.command(*get(A))) == B
    assert port.said == [{A: [get(A)]}, {B: [(b"ASKING",), get(A)]}] * 2


@pytest.mark.parametrize("host", ["", "?"])
def test_ask_without_a_host_means_the_host_that_says_it(host: str) -> None:
    port = Played(lambda node, words: node if node == B else port._refused(node, f"ASK 1 {host}:2"))
    assert asyncio.run(port.command(*get(A))) == B


def test_answers_stand_in_their_places_when_some_are_redirected() -> None:
    slot = slot_of(KEYS[A])

    def answer(node: str, words: Words) -> Any:
        if words == (b"ASKING",):
            return b"OK"
        return port._refused(node, f"ASK {slot} {C}") if node == A and words[0] == b"SET" else (node, words[0])

    port = Played(answer)
    commands = [get(A), (b"SET", KEYS[A], b"1"), get(C), (b"SET", KEYS[A], b"2"), get(A)]
    assert asyncio.run(port.exchange(commands)) == [(A, b"GET"), (C, b"SET"), (C, b"GET"), (C, b"SET"), (A, b"GET")]
    assert port.said[1] == {C: [(b"ASKING",), commands[1], (b"ASKING",), commands[3]]}, "each needs its own"


def test_two_servers_that_name_each_other_are_given_up() -> None:
    slot = slot_of(KEYS[A])
    port = Played(lambda node, words: port._refused(node, f"MOVED {slot} {B if node == A else A}"))
    with pytest.raises(WarmUnavailable, match="MOVED"):
        asyncio.run(port.command(*get(A)))
    assert len(port.said) == 1 + 5, "the short way, and then so often"
    assert port._topology.doubted


@pytest.mark.parametrize("word", ["CLUSTERDOWN", "READONLY", "MASTERDOWN"])
def test_a_server_that_may_not_serve_makes_one_look_again(word: str) -> None:
    port = Played(lambda node, words: port._refused(node, f"{word} because"))
    with pytest.raises(WarmUnavailable, match=word):
        asyncio.run(port.command(*get(A)))
    before = port.looks
    with pytest.raises(WarmUnavailable):
        asyncio.run(port.command(*get(A)))
    assert port.looks == before + 1


def test_tryagain_is_unavailable_and_no_reason_to_look() -> None:
    port = Played(lambda node, words: port._refused(node, "TRYAGAIN Multiple keys request during rehashing of slot"))
    with pytest.raises(WarmUnavailable, match="on their way"):
        asyncio.run(port.command(*get(A)))
    assert not port._topology.doubted


def away(node: str, words: Words) -> Any:
    if node == B:
        raise WarmUnavailable("b is away")
    return node


def test_one_server_that_is_away_is_an_answer_in_its_places() -> None:
    port = Played(away)
    found = asyncio.run(port.exchange([get(A), get(B), get(C), get(B)]))
    assert [found[0], found[2]] == [A, C]
    assert isinstance(found[1], WarmUnavailable)
    assert isinstance(found[3], WarmUnavailable)


def test_if_it_is_all_of_them_it_is_raised() -> None:
    port = Played(away)
    with pytest.raises(WarmUnavailable, match="b is away"):
        asyncio.run(port.exchange([get(B), get(B)]))


def test_a_slot_that_nobody_has_is_an_answer_in_its_place() -> None:
    """The other commands of the exchange are sent."""
    port = Played(lambda node, words: node)
    asyncio.run(port.command(b"PING"))
    port._topology._slots[slot_of(KEYS[B])] = ""
    port._topology._by_tag = {}
    found = asyncio.run(port.exchange([get(A), get(B), get(C)]))
    assert [found[0], found[2]] == [A, C]
    assert isinstance(found[1], WarmUnavailable)


def test_each_server_has_a_script_cache_of_its_own() -> None:
    """What stood behind an unknown script is repeated on that server, and on no other."""
    known = {A: {ONE.sha, TWO.sha}, B: {TWO.sha}, C: {ONE.sha}}
    ran: list[tuple[str, bytes]] = []

    def answer(node: str, words: Words) -> Any:
        if words[0] == b"EVAL":
            name = next(each for each in (ONE, TWO) if each.text == words[1])
            known[node].add(name.sha)
        elif words[1] not in known[node]:
            return ReplyError("NOSCRIPT No matching script")
        ran.append((node, words[-1]))
        return words[-1]

    port = Played(answer)
    calls = [(script, [KEYS[node]], [b"%s%d" % (node.encode(), at)]) for node in (A, B, C) for at, script in
             enumerate((ONE, TWO, ONE))]  # fmt: skip
    assert asyncio.run(port.scripts(calls)) == [arguments[0] for _, _, arguments in calls]
    for node in (A, B, C):
        done = [said for where, said in ran if where == node]
        last = [done[len(done) - done[::-1].index(said) - 1] for said in sorted(set(done))]
        assert last == [b"%s%d" % (node.encode(), at) for at in range(3)]
        assert done[-1] == b"%s2" % node.encode(), "the last of them runs last"
    assert [node for node, _ in ran].count(A) == 3, "it knew all"


def test_a_server_that_always_forgets_is_not_asked_for_ever() -> None:
    forgetful = Played(
        lambda node, words: words[-1] if words[0] == b"EVAL" else ReplyError("NOSCRIPT No matching script")
    )
    calls = [(ONE, [KEYS[A]], [b"%d" % at]) for at in range(4)]
    assert asyncio.run(forgetful.scripts(calls)) == [b"0", b"1", b"2", b"3"]


def test_a_script_that_the_target_of_a_slot_does_not_know_is_brought_there() -> None:
    slot, loaded = slot_of(KEYS[A]), set[str]()

    def answer(node: str, words: Words) -> Any:
        if words == (b"ASKING",):
            return b"OK"
        if node == A:
            return port._refused(node, f"ASK {slot} {B}")
        if words[0] == b"EVAL":
            loaded.add(node)
            return b"done"
        return b"done" if node in loaded else ReplyError("NOSCRIPT No matching script")

    port = Played(answer)
    assert asyncio.run(port.script(ONE, [KEYS[A]], [])) == b"done"
    loaded.clear()
    assert asyncio.run(port.scripts([(ONE, [KEYS[A]], []), (ONE, [KEYS[A]], [])])) == [b"done", b"done"]


async def test_data_is_held_elsewhere_unless_a_replica_was_promoted_in_its_place() -> None:
    servers = {
        A: ServerIdentity("here", "1", True),
        B: ServerIdentity("there", "2", True),
        C: ServerIdentity("other", "3", True),
    }

    class Asked(Played):
        async def identity_of(self, node: str) -> ServerIdentity:
            if servers[node].data == "away":
                raise WarmUnavailable(node)
            return servers[node]

    router = Asked()
    await router.look()
    router._topology.kind = "cluster"
    assert await router.has_data_elsewhere("there/2", A)
    assert not await router.has_data_elsewhere("here/1", A), "only there"
    servers[C] = ServerIdentity("away", "3", True)
    assert await router.has_data_elsewhere("there/2", A)
    servers[C] = ServerIdentity("new", "4", True, former="there")
    assert not await router.has_data_elsewhere("there/2", A)


def test_an_error_of_a_script_is_ours() -> None:
    port = Played(lambda node, words: ReplyError("NOPERM this user has no permissions"))
    with pytest.raises(ConfigurationError, match="lacks a right"):
        asyncio.run(port.script(ONE, [KEYS[A]], []))
    assert isinstance(asyncio.run(port.scripts([(ONE, [KEYS[A]], [])]))[0], ConfigurationError)


# Parts that each API implements for itself


class Refusing(Connections):
    """One server of the three refuses the login, another is away."""

    timeout = 1.0

    def used(self, drop: Any) -> None: ...

    def unused(self, drop: Any) -> None: ...

    def look(self) -> None:
        self.topology.look()

    def connect(self, node: str, *_: Any) -> Any:
        raise WarmUnavailable("away") if node == A else ConfigurationError("the server refused user name or password")

    async def connect_asyncio(self, node: str) -> Any:
        return self.connect(node)


@pytest.mark.parametrize("api", [nullcontext, bodies.blocking])
async def test_of_several_servers_one_that_refuses_the_login_is_an_error_as_of_one(api: Any) -> None:
    port = SharedPort(Refusing())  # type: ignore[arg-type]  # played
    with api():
        with pytest.raises(ConfigurationError, match="refused user name"):
            await port.exchange([get(A), get(B), get(C)])
        with pytest.raises(WarmUnavailable):
            await port.exchange([get(A)])
    with bodies.blocking():  # a loop would look again and again whether its threads have ended
        await port.close()


class Stale:
    """A connection to a server that has left since."""

    closed = False
    packer = Packer()

    def send(self, packed: bytes, seconds: float) -> None:
        raise OSError("reset")

    def close(self) -> None:
        self.closed = True


async def test_with_one_connection_that_turns_out_to_be_lost_all_free_ones_are_closed() -> None:
    """Each of them would cost a caller an attempt and a pause."""
    port = SharedPort(Refusing())  # type: ignore[arg-type]  # played
    free = [Stale() for _ in range(3)]
    port._free[A] = free.copy()  # type: ignore[assignment]
    port._free[B] = [Stale()]  # type: ignore[list-item]
    with bodies.blocking():
        found = await port.exchange_with_all({A: [get(A)], B: [get(B)]})
        assert all(isinstance(each, WarmUnavailable) for each in found.values())
        assert port._free[A] == []
        assert [each.closed for each in free[:2]] == [True, True]
        await port.close()


@pytest.mark.parametrize(
    ("error", "demoted"),
    [
        (ReplyError("READONLY You can't write against a read only replica."), True),
        (ReplyError("ERR WAIT cannot be used with replica instances. Please also note that ..."), True),
        (ReplyError("ERR WAITAOF cannot be used with replica instances. Please also note that ..."), True),
        (driver.ReadOnlyError("You can't write against a read only replica."), True),
        (ReplyError("LOADING it says READONLY somewhere else"), False),
        (driver.ConnectionError("gone"), False),
    ],
)
def test_a_server_that_became_a_replica_is_known_by_what_it_raises(error: Exception, demoted: bool) -> None:
    found = translate(error, "place")
    assert isinstance(found, WarmUnavailable)
    assert found.demoted is demoted
