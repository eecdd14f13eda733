"""What looks at every server of a cluster goes on when one of them is away."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_state.errors import ConfigurationError, WarmUnavailable
from distributed_state.port.blocking import finish
from distributed_state.programs.service.app import any_server
from distributed_state.store.doctor import check_server, refuse
from distributed_state.values.keys import Keys

pytestmark = pytest.mark.unit

INFO = b"redis_version:7.2.4\r\nrole:%b\r\naof_enabled:1\r\nmaxmemory_policy:noeviction\r\nmaxmemory:0\r\n"


class Servers:
    """A port: what each server answers, by its name."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def nodes(self) -> list[str]:
        return sorted(self.answers)

    def node_of(self, key: bytes) -> str:
        return self.nodes()[sum(key) % len(self.answers)]

    async def command_with(self, node: str, *words: bytes) -> Any:
        answer = self.answers[node]
        if isinstance(answer, Exception):
            raise answer
        return answer


def looked_at(**answers: Any) -> Any:
    return finish(check_server(Servers(**answers)))  # type: ignore[arg-type]


def test_the_doctor_names_each_server() -> None:
    found = {each.name: each for each in looked_at(a=INFO % b"master", b=INFO % b"slave")}
    assert found["a role"].ok
    assert not found["b role"].ok
    with pytest.raises(ConfigurationError, match="b role is slave; a read-only replica"):
        refuse(list(found.values()), "redis+cluster://a,b")
    assert [each.name for each in looked_at(a=INFO % b"master")][:2] == ["version", "eviction"], "one needs no name"


def test_a_server_that_is_away_is_shown_and_not_refused() -> None:
    found = {each.name: each for each in looked_at(a=INFO % b"master", b=WarmUnavailable("b: refused"))}
    assert not found["b server"].ok
    refuse(list(found.values()), "redis+cluster://a,b")
    with pytest.raises(WarmUnavailable, match="a: refused"):
        looked_at(a=WarmUnavailable("a: refused"), b=WarmUnavailable("b: refused"))


CACHE = b"used_memory:99\r\nmaxmemory:100\r\nmaxmemory_policy:volatile-lru"


@pytest.mark.parametrize(
    ("said", "name", "ok"),
    [
        (b"connected_clients:79\r\nmaxclients:100", "connections", True),
        (b"connected_clients:81\r\nmaxclients:100", "connections", False),
        (b"used_memory:79\r\nmaxmemory:100", "memory", True),
        (b"used_memory:81\r\nmaxmemory:100", "memory", False),
        (b"used_memory:81\r\nmaxmemory:0", "memory", True),
        (CACHE + b"\r\ndb0:keys=100,expires=90,avg_ttl=0", "memory", True),
        (CACHE + b"\r\ndb0:keys=100,expires=90\r\ndb1:keys=900,expires=0", "memory", False),
        (b"aof_enabled:0", "persistence", False),
        (b"aof_enabled:0\r\nloading:1", "persistence", True),
    ],
)
def test_a_server_that_is_not_well_is_named(said: bytes, name: str, ok: bool) -> None:
    found = {each.name: each for each in looked_at(a=INFO % b"master" + said + b"\r\n")}
    assert found[name].ok is ok
    assert bool(found[name].advice) is not ok


async def test_a_worker_is_ready_while_any_server_answers() -> None:
    away = WarmUnavailable("away")
    keys = Keys("n", 64)
    await any_server(Servers(a=away, b=None, c=away), keys)  # type: ignore[arg-type]
    await any_server(Servers(a=None), keys)  # type: ignore[arg-type]
    with pytest.raises(WarmUnavailable):
        await any_server(Servers(a=away, b=away), keys)  # type: ignore[arg-type]
