"""A Redis that answers and does not serve: /readyz tells, and a turn is answered 503 in time, never 500."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from deploy.load.attacks import CONVERSATIONS, HONEST, Target
from distributed_state.programs.servers import RedisServer, redis_server

RETRY_FOR, TIMEOUT = 0.5, 1.0
USER = ("ACL", "SETUSER", "worker", "on", ">secret", "~*", "&*")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis with a user for the worker."""
    with redis_server() as started:
        started.ask(*USER, "+@all")
        yield started


@pytest.fixture(scope="module")
def target(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A worker that repeats a command for half a second."""
    url = f"redis://worker:secret@127.0.0.1:{server.port}/0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTRIBUTED_STATE_RETRY_FOR", str(RETRY_FOR))
        patch.setenv("DISTRIBUTED_STATE_TIMEOUT", str(TIMEOUT))
        with Target(["--url", url, "--archive", f"sqlite:///{tmp_path_factory.mktemp('statuses')}/a.db"]) as started:
            yield started


def turn(target: Target) -> httpx.Response:
    return target.post(f"{CONVERSATIONS}/{HONEST}/turns", set={"a": 2})


def ready(target: Target) -> int:
    return target.http.get("/readyz").status_code


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    "fault", ["demoted", *(pytest.param(each, marks=pytest.mark.wide) for each in ("full", "not permitted", "frozen"))]
)
def test_a_redis_that_does_not_serve_is_told_by_status(server: RedisServer, target: Target, fault: str) -> None:
    assert soon(lambda: ready(target) == 200)
    _begin(server, fault)
    try:
        # A probe that only asks whether somebody is there says that all is well.
        assert fault == "frozen" or server.ask("PING") == "PONG"
        assert soon(lambda: ready(target) == 503)
        began = time.monotonic()
        answer = turn(target)
        assert time.monotonic() - began < RETRY_FOR + 2 * TIMEOUT + 10.0  # of a machine that runs other tests
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"]
        assert "127.0.0.1" not in answer.text
        assert target.http.get("/healthz").status_code == 200
    finally:
        _end(server, fault)
    assert soon(lambda: ready(target) == 200)
    assert soon(lambda: turn(target).status_code == 200)


def _begin(server: RedisServer, fault: str) -> None:
    if fault == "demoted":
        server.ask("REPLICAOF", "127.0.0.1", "1")
    elif fault == "full":
        server.ask("CONFIG", "SET", "maxmemory", "1")
    elif fault == "not permitted":
        server.ask("ACL", "SETUSER", "worker", "-@all", "+ping")
    else:
        server.pause()


def _end(server: RedisServer, fault: str) -> None:
    if fault == "demoted":
        server.ask("REPLICAOF", "NO", "ONE")
    elif fault == "full":
        server.ask("CONFIG", "SET", "maxmemory", "0")
    elif fault == "not permitted":
        server.ask(*USER, "+@all")
    else:
        server.resume()
