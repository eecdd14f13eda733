"""Where keys are, by servers that disagree. Law: the highest config epoch wins; a lower one never replaces it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from distributed_state.errors import ConfigurationError, WarmUnavailable
from distributed_state.port import topology
from distributed_state.port.addresses import read_address
from distributed_state.port.connections import Connections
from distributed_state.port.topology import SLOTS, Topology, slot_of

pytestmark = pytest.mark.unit

A, B, C = "10.0.0.1:7001", "10.0.0.2:7002", "10.0.0.3:7003"
Answers = dict[str, Any]


class Told:
    """What each server answers; one that is missing does not. `asked` counts."""

    def __init__(self, **answers: Any) -> None:
        self.answers: Answers = {}
        self.asked: list[str] = []

    def __call__(self, node: str, *commands: tuple[bytes, ...], timeout: float, sentinel: bool = False) -> list[Any]:
        self.asked.append(node)
        found = self.answers.get(node)
        if found is None:
            raise WarmUnavailable(f"{node} is silent")
        if isinstance(found, Exception):
            raise found
        return [found(command) for command in commands]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_PAUSE", 0)


def endpoint(node: str | None) -> tuple[bytes | None, int]:
    host, _, port = (node or ":0").rpartition(":")
    return (host.encode() if host != "-" else None), int(port)


def view(*parts: tuple[int, int, str, int], replicas: dict[str, list[str]] | None = None) -> Callable[..., Any]:
    """A server of a cluster that says who has which slots, under which epoch."""

    def answer(command: tuple[bytes, ...]) -> Any:
        if command == (b"CLUSTER", b"NODES"):
            line = "id-{0} {0}@1 master - 0 0 {1} connected"
            return "\n".join(line.format(node, epoch) for _, _, node, epoch in parts).encode()
        if command == (b"HELLO",):
            return [b"server", b"redis", b"mode", b"cluster", b"role", b"master"]
        assert command == (b"CLUSTER", b"SLOTS")
        rows = []
        for first, last, node, _ in parts:
            others = [[*endpoint(each), b"id-r"] for each in (replicas or {}).get(node, [])]
            rows.append([first, last, [*endpoint(node), b"id-%s" % node.encode()], *others])
        return rows

    return answer


def cluster(told: Told, url: str = "redis+cluster://10.0.0.1:7001") -> Topology:
    return Topology(read_address(url), 1.0, told)


# Slots


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        # As servers answer CLUSTER KEYSLOT (tests/programs/test_servers.py has them asked).
        (b"123456789", 12739),
        (b"{tag-1}:a", 13269),
        (b"foo{}{bar}", 8363),
        (b"foo{{bar}}zap", 4015),
        (b"foo{bar}{zap}", 5061),
        (b"bar", 5061),
        (b"", 0),
    ],
)
def test_the_slot_of_a_key_is_the_specifications(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_braces_that_nothing_closes_are_a_part_of_the_key() -> None:
    assert slot_of(b"foo{bar") != slot_of(b"bar")


# A cluster


def test_each_slot_belongs_to_whom_the_highest_epoch_says() -> None:
    """A third server has not heard yet that a slot moved; the one that has it now knows."""
    told = Told()
    told.answers = {
        A: view((0, 99, A, 1), (100, SLOTS - 1, B, 2)),
        B: view((0, 98, A, 1), (99, SLOTS - 1, B, 4)),
        C: view((0, 99, A, 1), (100, SLOTS - 1, B, 2)),
    }
    where = cluster(told, f"redis+cluster://{A},{B},{C}")
    where.look()
    assert [where._slots[slot] for slot in (0, 98, 99, 100)] == [A, A, B, B]
    assert where.nodes() == [A, B]
    assert not where.doubted


def test_a_server_that_was_cut_off_does_not_bring_the_old_back() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1)), B: view((0, SLOTS - 1, B, 5))}
    where = cluster(told, f"redis+cluster://{A},{B}")
    where.look()
    assert where.nodes() == [B]


def test_replicas_are_asked_when_every_primary_is_silent() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1), replicas={A: [C]})}
    where = cluster(told)
    where.look()
    told.answers = {C: view((0, SLOTS - 1, C, 2))}
    where.doubt()
    where.look()
    assert where.nodes() == [C]


def test_the_seeds_are_asked_when_all_that_was_known_is_gone() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, B, 1))}
    where = cluster(told)
    where.look()
    told.answers = {A: view((0, SLOTS - 1, C, 2))}
    where.doubt()
    where.look()
    assert where.nodes() == [C]


@pytest.mark.parametrize("host", ["-", "", "?"])
def test_a_server_that_names_no_host_is_where_it_was_asked(host: str) -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, f"{host}:7009", 1))}
    where = cluster(told)
    where.look()
    assert where.nodes() == ["10.0.0.1:7009"]


@pytest.mark.parametrize("host", ["", "?"])
def test_so_is_one_that_a_redirection_names_without_a_host(host: str) -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1))}
    where = cluster(told)
    where.look()
    where.moved(7, f"{host}:7009", A)
    assert where._slots[7] == "10.0.0.1:7009"


def test_slots_that_nobody_has_are_unavailable_and_the_others_are_not() -> None:
    told = Told()
    told.answers = {A: view((0, slot_of(b"{a}"), A, 1))}
    where = cluster(told)
    where.look()
    assert where.node_of(b"x{a}") == A
    missing = next(b"{%d}" % n for n in range(1000) if slot_of(b"{%d}" % n) > slot_of(b"{a}"))
    with pytest.raises(WarmUnavailable, match=f"slot {slot_of(missing)}"):
        where.node_of(missing)
    assert where.doubted, "it may be there by now"


def test_moved_replaces_one_slot_at_once() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1))}
    where = cluster(told)
    where.look()
    key = b"x{tag}"
    assert where.node_of(key) == A
    where.moved(slot_of(key), B, A)
    assert where.node_of(key) == B
    assert where.nodes() == [A, B]


def test_moved_is_heard_while_somebody_looks() -> None:
    """An event loop hears it: were it to wait for a look, all its tasks would, for a second."""
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1))}
    where = cluster(told)
    where.look()
    received = threading.Event()
    with where._looking:
        thread = threading.Thread(target=lambda: (where.moved(7, B, A), received.set()))
        thread.start()
        assert received.wait(5)
    thread.join()
    assert where._slots[7] == B


def test_who_left_is_dropped_and_who_stayed_is_not() -> None:
    told = Told()
    told.answers = {A: view((0, 99, A, 1), (100, SLOTS - 1, B, 2))}
    where, gone = cluster(told), list[str]()
    where.on_gone(gone.append)
    where.look()
    told.answers = {A: view((0, 99, A, 1), (100, SLOTS - 1, C, 3))}
    where.doubt()
    where.look()
    assert gone == [B]
    assert where.forget(gone.append)
    assert where.forget(gone.append), "a second time does no harm"


def test_what_is_known_is_used_while_nobody_says_anything() -> None:
    """A connection was reset, and all Sentinels are away: the primary still answers."""
    told = Told()
    told.answers = {S1: sentinel(A, 1)}
    where = watched(told)
    where.look()
    told.answers = {}
    where.doubt()
    where.look()
    assert where.only == A
    told.answers = {S2: sentinel(B, 2)}
    where.doubt()
    where.look()
    assert where.only == B


def test_one_that_is_silent_is_not_waited_for_when_most_have_answered() -> None:
    told, go_on = Told(), threading.Event()
    told.answers = {A: view((0, SLOTS - 1, A, 1)), B: view((0, SLOTS - 1, A, 1)), C: lambda command: go_on.wait(5)}
    where = cluster(told, f"redis+cluster://{A},{B},{C}")
    began = monotonic()
    where.look()
    assert monotonic() - began < 0.9
    assert where.nodes() == [A]
    go_on.set()


def test_a_doubt_that_comes_while_one_looks_is_looked_at_again() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1))}
    where = cluster(told)
    where.look()
    told.answers = {A: lambda command: (where.doubt(), view((0, SLOTS - 1, A, 1))(command))[1]}
    where.doubt()
    where.look()
    assert where.doubted


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, A, 1))}
    where = cluster(told)
    where.look()
    with where._looking, where._changing:
        where.inherited()
        assert where.doubted
        where.look()
    assert not where.doubted


def test_nor_for_one_that_began_to_listen_to_sentinels(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(topology._Listener, "start", lambda self: begun.append(self._seed))
    connections = Connections("redis+sentinel://a,b/mymaster", 1.0)
    watch, drop = connections._watch, begun.append
    assert watch is not None
    connections.used(drop)
    with watch._mutex:
        connections.inherited(drop)
        watch.begin()
        assert begun == ["a:26379", "b:26379"], "the child listens by threads of its own"


def test_nobody_to_ask_is_unavailable() -> None:
    where = cluster(Told())
    with pytest.raises(WarmUnavailable, match="silent"):
        where.look()
    assert where.doubted


def test_a_refused_login_is_said_and_not_taken_for_silence() -> None:
    told = Told()
    told.answers = {A: ConfigurationError("the server refused user name or password")}
    with pytest.raises(ConfigurationError, match="refused user name"):
        cluster(told).look()


# A plain url


def test_a_plain_url_of_a_server_of_a_cluster_is_a_cluster() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, B, 1))}
    where = Topology(read_address(f"redis://{A}"), 1.0, told)
    where.look()
    assert (where.kind, where.only, where.nodes()) == ("cluster", None, [B])


def test_a_plain_url_of_such_a_server_with_a_database_is_refused() -> None:
    told = Told()
    told.answers = {A: view((0, SLOTS - 1, B, 1))}
    with pytest.raises(ConfigurationError, match="only database 0"):
        Topology(read_address(f"redis://{A}/1"), 1.0, told).look()


def test_a_unix_socket_of_such_a_server_is_refused_with_the_reason() -> None:
    told = Told()
    told.answers = {"/run/r.sock": view((0, SLOTS - 1, B, 1))}
    with pytest.raises(ConfigurationError, match="which a Unix socket cannot reach"):
        Topology(read_address("unix:///run/r.sock"), 1.0, told).look()


@pytest.mark.parametrize(
    ("url", "said", "hint"),
    [
        (
            f"redis+sentinel://{A}/m",
            "ERR unknown command 'SENTINEL', with args",
            "is not a Sentinel: use redis:// for the server itself",
        ),
        (
            f"redis+cluster://{A}",
            "ERR This instance has cluster support disabled",
            "is not part of a cluster: .* redis://",
        ),
        (f"redis+cluster://{A}", "ERR unknown command 'CLUSTER', with args", "is not part of a cluster: .*sentinel"),
    ],
)
def test_a_url_of_another_kind_than_its_server_says_so_and_what_to_do(url: str, said: str, hint: str) -> None:
    told = Told()
    told.answers = {A: ConfigurationError(said)}
    with pytest.raises(ConfigurationError, match=hint) as caught:
        Topology(read_address(url), 1.0, told).look()
    assert "ERR" not in str(caught.value)


def standalone(command: tuple[bytes, ...]) -> Any:
    return [b"server", b"redis", b"mode", b"standalone", b"role", b"master"]


def test_a_plain_url_of_a_server_is_that_server_and_never_doubted_again() -> None:
    told = Told()
    told.answers = {A: standalone}
    where = Topology(read_address(f"redis://{A}"), 1.0, told)
    where.look()
    assert where.only == A
    where.doubt()
    assert not where.doubted


def test_a_server_that_may_not_say_so_shows_that_it_is_a_clusters_by_redirecting() -> None:
    told = Told()
    told.answers = {A: ConfigurationError("the user lacks a right: NOPERM hello")}
    where = Topology(read_address(f"redis://{A}"), 1.0, told)
    where.look()
    assert where.only == A
    where.moved(7, B, A)
    assert (where.kind, where.only, where._slots[7], where.doubted) == ("cluster", None, B, True)


# Sentinels


S1, S2, S3 = "10.0.1.1:26379", "10.0.1.2:26379", "10.0.1.3:26379"


def sentinel(primary: str, epoch: int, current: str = "") -> Callable[..., Any]:
    """A Sentinel that names a primary; `current`: the replica that it promotes just now."""
    host, _, port = primary.rpartition(":")

    def answer(command: tuple[bytes, ...]) -> Any:
        assert command[0] == b"SENTINEL"
        assert command[2] == b"mymaster"
        if command[1] == b"GET-MASTER-ADDR-BY-NAME":
            named_host, _, named_port = (current or primary).rpartition(":")
            return [named_host.encode(), named_port.encode()]
        return [b"name", b"mymaster", b"ip", host.encode(), b"port", port.encode(), b"config-epoch", b"%d" % epoch]

    return answer


def watched(told: Told) -> Topology:
    return Topology(read_address(f"redis+sentinel://{S1},{S2},{S3}/mymaster"), 1.0, told)


def test_the_sentinel_with_the_highest_epoch_is_believed() -> None:
    """Two were cut off with the old primary, and still name it."""
    told = Told()
    told.answers = {S1: sentinel(A, 1), S2: sentinel(A, 1), S3: sentinel(B, 2)}
    where = watched(told)
    where.look()
    assert where.only == B


def test_a_lower_epoch_never_replaces_a_higher() -> None:
    told = Told()
    told.answers = {S1: sentinel(B, 2)}
    where = watched(told)
    where.look()
    told.answers = {S2: sentinel(A, 1), S3: sentinel(A, 1)}
    where.doubt()
    where.look()
    assert where.only == B


def test_a_sentinel_that_leads_a_failover_names_the_old_primary_beside_the_new_epoch() -> None:
    """Until all replicas follow, which may take minutes. Who is promoted stands in another answer."""
    told = Told()
    told.answers = {S1: sentinel(A, 2, current=B)}
    where = watched(told)
    where.look()
    assert where.only == B


def test_dead_sentinels_are_passed_over() -> None:
    told = Told()
    told.answers = {S3: sentinel(A, 1)}
    where = watched(told)
    where.look()
    assert where.only == A
    assert set(told.asked) == {S1, S2, S3}


def test_an_unknown_service_is_said() -> None:
    told = Told()
    told.answers = dict.fromkeys((S1, S2, S3), ConfigurationError("ERR No such master with that name"))
    with pytest.raises(ConfigurationError, match="No such master"):
        watched(told).look()


def test_the_old_primary_is_dropped_at_a_switch() -> None:
    told = Told()
    told.answers = {S1: sentinel(A, 1)}
    where, gone = watched(told), list[str]()
    where.on_gone(gone.append)
    where.look()
    told.answers = {S1: sentinel(B, 2)}
    where.doubt()
    where.look()
    assert gone == [A]


def test_without_comparing_epochs_the_old_primary_would_come_back() -> None:
    """Negative control."""
    told = Told()
    told.answers = {S1: sentinel(B, 2)}
    where = watched(told)
    where.look()
    told.answers = {S2: sentinel(A, 1), S3: sentinel(A, 1)}
    where._epoch = -1
    where.doubt()
    where.look()
    assert where.only == A
