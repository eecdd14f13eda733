"""The end of a worker as its clients see it: who has connected is answered, and who has not is refused."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from below import ROOT
from serving import served

from distributed_state import AsyncStateStore
from distributed_state.errors import ColdUnavailable
from distributed_state.programs import logs
from distributed_state.programs.service import Limits, connections, running

_ASK = b"GET /v1/caller HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def worker(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves as the command does, and its port."""
    place = "--archive", f"sqlite:///{folder}/a.db"
    command = [sys.executable, "-m", "distributed_state", *place, "serve", "--port", "0"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process, int(json.loads(process.stdout.readline())["message"].rpartition(":")[2])
        finally:
            process.kill()


def read(client: socket.socket, end: bytes = b"}") -> bytes:
    """An answer up to these bytes, or what came before the connection ended."""
    found = b""
    while not found.endswith(end) and (more := client.recv(65536)):
        found += more
    return found


def until_refused(port: int, seen: Counter[str], busy: threading.Barrier) -> None:
    """Connect and ask again and again. Each connection is answered, until there is none.

    A client that was held up for so long before it asked that the worker need not wait for it is not counted.
    """
    busy.wait()
    while True:
        began = time.monotonic()
        try:
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
        except ConnectionRefusedError:
            seen["refused"] += 1
            return
        with client:
            held_up = time.monotonic() - began
            try:
                client.sendall(_ASK + b"Connection: close\r\n\r\n")
                held_up = time.monotonic() - began
                found = read(client)[:12].decode() or "nothing"
            except OSError as error:
                found = repr(error)
            if found.startswith("HTTP") or held_up < connections._LAST:
                seen[found] += 1


@pytest.mark.parametrize("round", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2))])
@pytest.mark.wide
def test_a_worker_that_ends_under_load_loses_no_connection(tmp_path: Path, round: int) -> None:
    many = 12
    seen, busy = Counter[str](), threading.Barrier(many + 1)
    with worker(tmp_path, "--notice", "0") as (process, port):
        clients = [threading.Thread(target=until_refused, args=(port, seen, busy)) for _ in range(many)]
        for each in clients:
            each.start()
        busy.wait()
        while seen["HTTP/1.1 200"] < 100:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        for each in clients:
            each.join(60)
        assert (process.wait(30), process.communicate()[1]) == (0, "")
    assert set(seen) == {"HTTP/1.1 200", "refused"}, seen
    assert seen["refused"] == many


def test_a_worker_that_ends_closes_idle_connections_and_answers_what_has_begun(tmp_path: Path) -> None:
    with worker(tmp_path, "--notice", "0") as (process, port):
        idle, begun, again, silent = (socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(4))
        with idle, begun, again, silent:
            for client in idle, again:
                client.sendall(_ASK + b"\r\n")
                assert read(client).startswith(b"HTTP/1.1 200")
            for client in begun, again:
                client.sendall(_ASK)
            process.send_signal(signal.SIGTERM)
            assert idle.recv(1) == b"", "closed, and not reset"
            assert process.poll() is None
            for client in begun, again:
                client.sendall(b"\r\n")
                assert b"connection: close" in (found := read(client)).lower(), found
                assert found.startswith(b"HTTP/1.1 200")
                assert client.recv(1) == b""
            assert silent.recv(1) == b"", "it is not waited for as long as usual"
        assert (process.wait(30), process.communicate()[1]) == (0, "")


async def test_a_worker_that_has_archived_everything_ends_without_asking_sql(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = await AsyncStateStore.open(redis_url, archive=f"sqlite:///{tmp_path}/a.db", namespace=namespace)
    assert await store.session("s").set("n", 1) == 1
    assert await store.admin.archive() >= 0

    def away(_: object) -> None:
        raise ColdUnavailable("SQL is away")

    monkeypatch.setattr(type(store._lifecycle.tiers().cold), "cursors", away)
    with pytest.raises(ColdUnavailable):
        await store.admin.archive()  # the control: most partitions were never used, and only SQL knows that
    assert await running._close(store, Limits())
    assert "not everything is archived" not in caplog.text


def test_logs_name_the_replica_of_a_service_until_it_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs._NAMED, "replicas", [])  # another test's service may be open in this process
    handler, written, log = logs.json_lines(), io.StringIO(), logging.getLogger("distributed_state.test_ending")
    handler.setStream(written)
    log.addHandler(handler)
    try:
        with served(None, "memory", "n") as client:
            assert client.get("/readyz").status_code == 200, "it has begun"
            log.error("while it is open")
        log.error("after it has closed")
    finally:
        log.removeHandler(handler)
    during, after = map(json.loads, written.getvalue().splitlines())
    assert during["replica"]
    assert "replica" not in after


def test_a_look_up_that_fails_after_its_connect_is_cancelled_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def connect_and_cancel(times: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(times):
            connecting = loop.create_task(loop.create_connection(asyncio.Protocol, "nowhere.invalid", 1))
            await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.wait([connecting])
        with pytest.raises(socket.gaierror):
            await loop.create_connection(asyncio.Protocol, "nowhere.invalid", 1)  # after the others

    def logged(factory: Callable[[], asyncio.AbstractEventLoop]) -> list[str]:
        caplog.clear()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(connect_and_cancel(8))
            gc.collect()
        return [each for each in caplog.messages if "never retrieved" in each]

    assert not logged(running.new_loop)
    uvloop = pytest.importorskip("uvloop")
    assert logged(uvloop.new_event_loop), "the control"
