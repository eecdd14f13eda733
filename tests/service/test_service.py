"""`distributed-state serve`: workers as processes, on real servers, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from below import ROOT, hidden, until
from below import Worker as Dying
from proxy import Proxy
from serving import served
from typer.testing import CliRunner

from distributed_state import StateStore
from distributed_state.programs.cli import shell
from distributed_state.programs.servers import RedisServer, postgres_server, redis_server
from distributed_state.programs.service import Limits, Service
from distributed_state.values import access_tokens
from distributed_state.warm.scripts import COMMIT

LISTED = {"id", "user", "version", "created", "updated", "deleted", "cursor", "phase", "size"}


JSON = {"Content-Type": "application/json"}


class Worker:
    """A process that serves, and how to ask it."""

    def __init__(self, *words: str, **environment: str) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        quick = {f"DISTRIBUTED_STATE_{name}": value for name, value in ({"RETRY_FOR": "1.0"} | environment).items()}
        place, urls = hidden(*words[:6])
        command = [sys.executable, "-m", "distributed_state", *place, "serve", "--port", "0", *words[6:]]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"PYTHONPATH": path} | urls | quick
        )
        self.url = ""

    def ready(self) -> Worker:
        """Wait until it serves."""
        self.url = self.reported("serving on ")
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=JSON)
        return self

    def reported(self, what: str) -> str:
        """What the next line on stdout names after these words."""
        line = self.line()
        assert what in line, f"{line} {self.process.communicate(timeout=20)}"
        return str(json.loads(line)["message"]).removeprefix(what)

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def post(self, path: str, **given: Any) -> httpx.Response:
        return self.http.post(path, json=given)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def figure(self, name: str) -> float:
        """What /metrics says."""
        return figure(self.http, name)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "http"):
            self.http.close()
        self.process.kill()
        self.process.communicate()


def figure(client: httpx.Client, name: str) -> float:
    """What /metrics says of one series, or of all that have this name."""
    lines = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines()]
    return sum(float(value) for series, _, value in lines if name in (series, series.split("{")[0]))


@pytest.fixture
def options(servers: Any, tmp_path: Path, namespace: str) -> tuple[str, ...]:
    """Where the workers of a test keep their state."""
    return _options(servers.redis("valkey").url, f"sqlite:///{tmp_path}/archive.db", namespace)


def _options(url: str, archive: str, namespace: str) -> tuple[str, ...]:
    return "--url", url, "--archive", archive, "--namespace", namespace


def store_of(options: tuple[str, ...]) -> StateStore:
    """What a test looks with at what the workers did."""
    return StateStore.open(options[1], archive=options[3], namespace=options[5])


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    return asyncio.run(until(condition, seconds, every=0.02))


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]


HI = {"role": "user", "content": "hi"}


# Conversations


@pytest.mark.parametrize("kind", ["redis", pytest.param("valkey", marks=pytest.mark.wide)])
def test_a_conversation_is_begun_led_read_listed_and_deleted(servers: Any, kind: str, namespace: str) -> None:
    with Worker(*_options(servers.redis(kind).url, servers.database(), namespace)).ready() as worker:
        fields = {"nights": 3, "large": 12345678901234567890123, "odd": "\udc80\x00", "deep": [[]]}
        # As ASCII: a lone surrogate cannot be sent otherwise.
        body = json.dumps({"id": "c1", "user": "u1", "fields": fields})
        began = worker.http.post("/v1/conversations", content=body)
        assert (began.status_code, began.json()) == (201, {"id": "c1", "version": 1})
        done = worker.post("/v1/conversations/c1/turns", messages=[HI], set={"nights": 4}, event="new_task")
        assert done.json() == {"version": 2, "repeated": False, "outcome": {"version": 2, "phase": "planning"}}
        for number in range(3):
            worker.post("/v1/conversations/c1/turns", messages=[HI | {"content": str(number)}])
        found = worker.get("/v1/conversations/c1", params={"last": 2}).json()
        assert found == {
            "id": "c1",
            "version": 5,
            "phase": "planning",
            "fields": fields | {"nights": 4},
            "messages": [HI | {"content": "1"}, HI | {"content": "2"}],
        }
        assert worker.get("/v1/conversations/c1", params={"last": 0, "fresh": "true"}).json()["messages"] == []
        assert worker.post("/v1/conversations").json()["version"] == 1, "an id is made up"
        like = {"base64": "AA=="}
        worker.post("/v1/conversations", id="b", fields={"like": like}, bytes={"photo": "/w=="})
        worker.post("/v1/conversations/b/turns", bytes={"more": "AA=="})
        found = worker.get("/v1/conversations/b").json()
        assert (found["fields"], found["bytes"]) == ({"like": like}, {"photo": "/w==", "more": "AA=="})
        for wrong in ({"photo": "?"}, {"photo": 1}, []):
            assert said(worker.post("/v1/conversations", bytes=wrong)) == (422, "InvalidValue")
        worker.http.delete("/v1/conversations/b")

        def listed(**asked: Any) -> Any:
            return worker.get("/v1/conversations", params=asked).json()

        wait_for(lambda: [each["version"] for each in listed()["conversations"]] == [1, 5])  # as it is archived
        (row,) = listed(user="u1")["conversations"]
        assert row.keys() == LISTED
        assert (row["id"], row["version"]) == ("c1", 5)
        page = listed(limit=1)
        assert listed(limit=1, after=page["after"])["conversations"] == [row]
        assert worker.http.delete("/v1/conversations/c1").json() == {"version": 6}
        assert worker.http.delete("/v1/conversations/c1").json() == {"version": 6}
        assert said(worker.get("/v1/conversations/c1")) == (410, "Deleted")
        assert said(worker.post("/v1/conversations/c1/turns", messages=[HI])) == (410, "Deleted")
        (replica,) = worker.get("/v1/replicas").json()["replicas"]
        assert replica["pid"] == worker.process.pid


BAD = (
    ("POST", "/v1/conversations", b"{", 422, "InvalidValue"),
    ("POST", "/v1/conversations", b"[1]", 422, "InvalidValue"),
    ("POST", "/v1/conversations", b"[" * 100_000, 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"id": "\xff"}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"id": 7}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"id": ""}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"id": "..."}', 201, ""),
    ("POST", "/v1/conversations", b'{"fields": {"#v": 1}}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"fields": {"n": NaN}}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"feilds": {}}', 422, "InvalidValue"),
    ("POST", "/v1/conversations", b'{"id": "there"}', 409, "Conflict"),
    ("POST", "/v1/conversations/there/turns", b"", 422, "InvalidValue"),
    ("POST", "/v1/conversations/there/turns", b'{"messages": {}}', 422, "InvalidValue"),
    ("POST", "/v1/conversations/there/turns", b'{"messages": [{"role": "king"}]}', 422, "InvalidValue"),
    ("POST", "/v1/conversations/there/turns", b'{"set": {"a": 1}, "request_id": "#"}', 422, "InvalidValue"),
    ("POST", "/v1/conversations/there/turns", b'{"event": "fly"}', 409, "InvalidTransition"),
    ("POST", "/v1/conversations/nobody/turns", b'{"set": {"a": 1}}', 404, "NotFound"),
    ("GET", "/v1/conversations/nobody", b"", 404, "NotFound"),
    ("DELETE", "/v1/conversations/nobody", b"", 404, "NotFound"),
    ("GET", "/v1/conversations/there?last=-1", b"", 422, "InvalidValue"),
    ("GET", "/v1/conversations/there?fresh=maybe", b"", 422, "InvalidValue"),
    ("GET", "/v1/conversations?limit=0", b"", 422, "InvalidValue"),
    ("GET", "/v1/conversations?after=x", b"", 422, "InvalidValue"),
    ("GET", "/v1/events?types=a[", b"", 422, "InvalidValue"),
    ("GET", "/v1/events?since=yesterday", b"", 422, "InvalidValue"),
    ("GET", "/readyz?need=luck", b"", 422, "InvalidValue"),
    ("GET", "/nowhere", b"", 404, "NotFound"),
    ("PUT", "/v1/conversations", b"", 405, "MethodNotAllowed"),
)


def test_a_bad_request_is_told_why_and_changes_nothing(shared: Worker) -> None:
    before = shared.get("/v1/conversations/there").json()
    for method, path, body, status, error in BAD:
        answer = shared.http.request(method, path, content=body)
        assert answer.status_code == status, (path, body[:100], answer.text)
        assert answer.json().get("error", "") == error
        assert error == "" or answer.json()["detail"]
        assert shared.get("/v1/conversations/there").json() == before, (path, body[:100])
        assert shared.get("/v1/conversations/nobody").status_code == 404


@pytest.fixture(scope="module")
def shared_options(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Where the shared worker keeps its state."""
    folder = tmp_path_factory.mktemp("service")
    return _options(servers.redis("valkey").url, f"sqlite:///{folder}/a.db", f"t{os.urandom(6).hex()}")


@pytest.fixture(scope="module")
def shared(shared_options: tuple[str, ...]) -> Iterator[Worker]:
    """One worker for all tests that it need not end in."""
    with Worker(*shared_options, "--max-body", "200000").ready() as worker:
        worker.post("/v1/conversations", id="there", fields={"a": 0})
        yield worker


def test_more_steps_than_one_commit_takes_are_refused(shared: Worker) -> None:
    """What a request may set and append has a lower limit; tags are counted where the commit is put together."""
    names = [f"n{number}" for number in range(10_001)]
    answer = shared.post("/v1/conversations/there/writes", increment=dict.fromkeys(names, 1))
    assert said(answer) == (422, "InvalidValue")
    answer = shared.post("/v1/conversations/there/writes", untag={"run": names})
    assert said(answer) == (413, "TooLarge")
    assert "one commit changes at most 10000 fields, messages and tags" in answer.text


def test_a_huge_body_is_refused_before_it_is_read(shared: Worker) -> None:
    announced = shared.http.post("/v1/conversations", content=b"x" * 300_000)
    assert said(announced) == (413, "TooLarge")

    def endless() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    assert said(shared.http.post("/v1/conversations", content=endless())) == (413, "TooLarge")
    with socket.create_connection(shared.http.base_url.netloc.decode().split(":")) as raw:  # type: ignore[arg-type]
        raw.sendall(
            b"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert b" 413 " in raw.recv(1000), "nothing of it was sent"
    assert shared.get("/healthz").status_code == 200


def raw(worker: Worker) -> socket.socket:
    """A connection of which every byte is ours."""
    host, port = worker.http.base_url.host, worker.http.base_url.port
    return socket.create_connection((host, port), timeout=10)


def answered(connection: socket.socket) -> bytes:
    """All that comes until the worker closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_client_that_would_like_http_2_has_its_body_read(shared: Worker, pieces: int) -> None:
    """Java's HttpClient asks so of every server that is not known to it."""
    upgrade = "Content-Type: application/json\r\n"
    upgrade += "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk"
    body = json.dumps({"id": f"h2c-{pieces}"})
    head = f"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{upgrade}\r\n\r\n"
    with raw(shared) as connection:
        connection.sendall((head + body[:5]).encode() if pieces == 2 else (head + body).encode())
        if pieces == 2:
            time.sleep(0.1)  # two packets
            connection.sendall(body[5:].encode())
        assert json.loads(answered(connection).split(b"\r\n\r\n")[1]) == {"id": f"h2c-{pieces}", "version": 1}


ENDLESS = (
    "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ",
    "GET /",
    "POST /x HTTP/1.1\r\nHost: localhost\r\n{}\r\n\r\n0\r\nX: ",
)


@pytest.mark.parametrize("begun", ENDLESS)
def test_a_head_without_an_end_is_not_kept(shared: Worker, begun: str) -> None:
    with raw(shared) as connection:
        connection.sendall(begun.format("Transfer-Encoding: chunked").encode())
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x" * 20_000)
    with raw(shared) as connection:
        head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: "
        connection.sendall(head + b"x" * 30_000 + b"\r\n\r\n")
        assert answered(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.wide
def test_requests_of_one_packet_are_all_answered_and_end_with_their_connection(shared: Worker) -> None:
    healthz = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with raw(shared) as connection:
        connection.sendall(healthz + healthz.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert answered(connection).count(b'{"status":"alive"}') == 2
    with raw(shared) as connection:
        connection.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n" + healthz)
        wait_for(lambda: shared.figure("distributed_state_http_event_streams") == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # broken, not closed
    wait_for(lambda: shared.figure("distributed_state_http_event_streams") == 0, 5)


def test_a_repeated_request_is_answered_as_the_first_was(options: tuple[str, ...]) -> None:
    """By another replica too, and if both are asked at once."""
    place = options[1::2]
    with served(*place, service=Service()) as one, served(*place, service=Service()) as other:

        def turn(at: httpx.Client, **given: Any) -> Any:
            return at.post("/v1/conversations/c/turns", json={"messages": [HI]} | given).json()

        one.post("/v1/conversations", json={"id": "c"})
        first = turn(one, request_id="r1", event="new_task")
        turn(one)
        assert turn(other, request_id="r1", event="new_task") == first | {"repeated": True}
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(turn, each, request_id="r2") for each in (one, other) * 4]
            answers = [each.result() for each in asked]
        assert sorted(each.pop("repeated") for each in answers) == [False] + [True] * 7
        assert all(each == answers[0] for each in answers)
        assert len(other.get("/v1/conversations/c", params={"fresh": "true"}).json()["messages"]) == 3


@pytest.mark.wide
def test_a_turn_whose_users_part_is_missing_is_to_be_repeated(options: tuple[str, ...]) -> None:
    """Whoever has its request id repeats it until that is complete, here a turn that a library's worker began."""

    def again() -> httpx.Response:
        return worker.post("/v1/conversations/c/turns", request_id="r", messages=[HI])

    place = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    with Dying("visit", id="c", user="u1", request_id="r", **place) as dying:
        dying.process.wait(30)
    with Worker(*options, "--busy", "0.1").ready() as worker, store_of(options) as store:
        with store.user("u1").lock():
            response = again()
            assert said(response) == (503, "DurabilityUnknown")
            assert response.headers["retry-after"] == "1"
            assert "the turn is applied" in response.json()["detail"]
        assert store.user("u1").version(fresh=True) == 0
        assert again().json()["outcome"] == again().json()["outcome"] == {"version": 1}
        assert (store.user("u1").get("visits"), store.session("c").version(fresh=True)) == (1, 1)


def test_a_request_that_the_library_answered_has_the_outcome_it_left(options: tuple[str, ...]) -> None:
    """Which need not be as the service's own are."""
    with served(*options[1::2], service=Service()) as client, store_of(options) as store:
        for at, outcome in enumerate([None, {"version": "two"}, "Booked", 7, [1], {"city": "Oslo"}]):
            with store.session(f"c{at}").turn(request_id="r") as turn:
                turn.append(HI)
                turn.outcome = outcome
            response = client.post(f"/v1/conversations/c{at}/turns", json={"request_id": "r", "messages": [HI]})
            assert response.status_code == 200
            assert response.json() == {"version": 1, "repeated": True, "outcome": outcome}


@pytest.mark.wide
def test_who_acts_is_in_the_history_and_the_request_in_the_log(options: tuple[str, ...]) -> None:
    with Worker(*options, "--access-log").ready() as worker:
        headers = {"X-Actor": "Zoë".encode(), "X-Request-Id": "7f", **JSON}
        body = json.dumps({"id": "c"}).encode()
        answer = worker.http.post("/v1/conversations", content=body, headers=headers)  # type: ignore[arg-type]
        assert answer.headers["x-request-id"] == "7f"
        made = worker.get("/nowhere").headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
        with store_of(options) as store:
            assert [each.actor for each in store.session("c").history()] == ["Zoë"]
        lines = [json.loads(worker.line()) for _ in range(2)]
    assert [(each["method"], each["path"], each["status"], each["request_id"]) for each in lines] == [
        ("POST", "/v1/conversations", 201, "7f"),
        ("GET", "/nowhere", 404, made),
    ]


def test_a_busy_conversation_and_a_busy_worker_are_told_apart(options: tuple[str, ...]) -> None:
    service = Service(Limits(busy=0.3, requests=1, streams=0))
    with served(*options[1::2], service=service) as client, store_of(options) as store:
        client.post("/v1/conversations", json={"id": "c"})
        with store.session("c").lock(), waiting_turn(client) as turn:
            while not turn.done():
                refused = client.get("/v1/conversations/c")
                if refused.status_code == 429:
                    assert (refused.json()["error"], refused.headers["retry-after"]) == ("TooManyRequests", "1")
                    break
            locked = turn.result()
        assert said(locked) == (423, "LockTimeout")
        assert locked.headers["retry-after"] == "1"
        assert refused.status_code == 429
        assert said(client.get("/v1/events")) == (429, "TooManyRequests")


@contextmanager
def waiting_turn(client: httpx.Client, **given: Any) -> Iterator[Future[httpx.Response]]:
    """A turn that is under way, if its conversation is locked."""
    url = client.base_url.join("/v1/conversations/c/turns")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, url, json={"messages": [HI]} | given, timeout=30)
        wait_for(lambda: asked.done() or figure(client, "distributed_state_http_requests_running") >= 1)
        yield asked


def test_figures_are_told(shared: Worker) -> None:
    made = 'distributed_state_http_requests_total{method="POST",route="/v1/conversations",status="201"}'
    before = figure(shared.http, made)
    shared.post("/v1/conversations")
    assert figure(shared.http, made) == before + 1
    found = shared.get("/metrics")
    assert "distributed_state_hot_hits" in found.text
    assert found.headers["content-type"].startswith("text/plain")


# Beginning and end


@pytest.mark.wide
def test_a_conversation_whose_worker_died_mid_turn_is_free_soon(options: tuple[str, ...]) -> None:
    with Proxy(options[1]) as proxy, Worker("--url", proxy.url, *options[2:]).ready() as worker:
        worker.post("/v1/conversations", id="c")
        loss = proxy.lose(COMMIT.sha)
        with waiting_turn(worker.http, request_id="r") as turn:
            assert loss.happened.wait(20)
            worker.process.kill()
        assert turn.exception() is not None
        with Worker(*options, "--busy", "20").ready() as other:  # a lock's usual ttl is 30 s
            answer = other.post("/v1/conversations/c/turns", request_id="r", messages=[HI])
            assert (answer.status_code, answer.json()["version"]) == (200, 2)
    with store_of(options) as store:
        assert [each.to_dict() for each in store.session("c").messages()] == [HI]


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_turn_that_runs_at_the_end_is_finished(options: tuple[str, ...], number: int) -> None:
    with Worker(*options, "--notice", "0.5").ready() as worker, store_of(options) as store:
        worker.post("/v1/conversations", id="c")
        lock = store.session("c").lock()
        with lock, waiting_turn(worker.http, request_id="r") as turn:
            worker.process.send_signal(number)
            leaving = wait_for(lambda: (got := worker.get("/readyz")).status_code == 503 and got)
            assert leaving.json() == {"status": "draining"}
            assert worker.get("/v1/conversations/c").status_code == 200, "until the notice is over it serves"
            assert said(worker.get("/v1/events")) == (503, "Unavailable")
            assert not turn.done()
            lock.__exit__(None, None, None)
            answer = turn.result()
        assert (answer.status_code, answer.json()["version"]) == (200, 2)
        assert answer.headers["connection"] == "close"
        assert worker.process.wait(20) == 0
        assert worker.process.stderr is not None
        assert worker.process.stderr.read() == ""
        assert [each.to_dict() for each in store.session("c").messages(fresh=True)] == [HI]
        assert [each.id for each in store.admin.replicas()] == [store.replica], "it said that it leaves"


@pytest.mark.wide
def test_a_turn_that_does_not_end_is_given_up_and_changes_nothing(options: tuple[str, ...]) -> None:
    with Worker(*options, "--notice", "0", "--drain", "0.3").ready() as worker, store_of(options) as store:
        worker.post("/v1/conversations", id="c")
        with store.session("c").lock(), waiting_turn(worker.http) as turn:
            assert worker.end() == 0
            answer = turn.result()
        assert said(answer) == (503, "Unavailable")
        assert answer.headers["retry-after"] == "1"
        assert store.session("c").version(fresh=True) == 1


@pytest.mark.wide
def test_what_is_acknowledged_is_archived_at_the_end_and_no_request_is_logged_unasked(options: tuple[str, ...]) -> None:
    """A level of logging does not ask for it: a line of it costs as much as a turn."""
    with Worker(*options, ARCHIVE_EVERY="60", LOG_LEVEL="info").ready() as worker:
        assert worker.post("/v1/conversations", id="c").status_code == 201
        worker.process.send_signal(signal.SIGTERM)
        said = worker.process.communicate(timeout=30)
        assert worker.process.returncode == 0
        assert "conversations" not in "".join(said)
    with StateStore.open(options[1], archive=options[3], namespace=options[5], archiver=False) as store:
        assert store.admin.stats()["unarchived"] == 0


@pytest.mark.wide
def test_a_second_signal_ends_it_at_once(options: tuple[str, ...]) -> None:
    with Worker(*options, "--notice", "300").ready() as worker:
        worker.process.send_signal(signal.SIGTERM)
        wait_for(lambda: worker.get("/readyz").status_code == 503)
        assert worker.end() == 128 + signal.SIGTERM, "long before the notice is over"


@pytest.mark.wide
def test_it_waits_for_its_servers_and_says_so(tmp_path: Path) -> None:
    with redis_server() as server:
        server.stop()
        port = _free()
        options = _options(server.url, f"sqlite:///{tmp_path}/a.db", "n")
        with Worker(*options, "--port", str(port)) as worker, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            wait_for(lambda: _alive(port))
            assert http.get("/readyz").json() == {"status": "starting"}
            refused = http.get("/v1/conversations/c")
            assert (said(refused), refused.headers["retry-after"]) == ((503, "Unavailable"), "1")
            server.start()
            worker.ready()
            assert http.get("/readyz").status_code == 200
            assert said(http.get("/v1/conversations/c")) == (404, "NotFound")
        server.stop()
        with Worker(*options, "--port", str(port)) as worker:
            wait_for(lambda: _alive(port))
            assert worker.end() == 0, "told to end before it began"
        with Worker(*options, "--wait", "0.5") as worker:
            out, err = worker.process.communicate(timeout=30)
            assert (worker.process.returncode, out) == (1, "")
            assert f"127.0.0.1:{server.port}" in ended_for(err)


def ended_for(log: str) -> str:
    """Why a worker ended, as its log says last; every line of a log that is no terminal is JSON."""
    last = [json.loads(line) for line in log.splitlines()][-1]
    assert last["level"] == "CRITICAL"
    assert "exc_info" not in last
    return str(last["message"])


def _alive(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return answered(connection).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ({"--archive": "nosuch://x"}, {}, "nosuch"),
        ({}, {"PARTITIONS": "0"}, "partitions"),
    ],
)
def test_a_broken_setting_fails_at_once(
    options: tuple[str, ...], words: dict[str, str], environment: dict[str, str], expected: str
) -> None:
    given = dict(zip(options[::2], options[1::2], strict=True)) | words
    flat = tuple(word for pair in given.items() for word in pair)
    with Worker(*flat, "--wait", "60", **environment) as worker:
        out, err = worker.process.communicate(timeout=30)
    assert (worker.process.returncode, out) == (1, "")
    assert expected in ended_for(err)
    assert len(err.splitlines()) == 1


@pytest.mark.wide
def test_an_address_that_is_taken_is_one_line_of_error(options: tuple[str, ...], shared: Worker) -> None:
    port = shared.url.rpartition(":")[2]
    with Worker(*options, "--port", port) as second:
        out, err = second.process.communicate(timeout=30)
    assert (second.process.returncode, out) == (1, "")
    assert ended_for(err) == f"ended: 127.0.0.1:{port}: Address already in use"
    assert len(err.splitlines()) == 1


# Servers that are away


@pytest.mark.wide
def test_without_redis_it_says_so_and_comes_back(tmp_path: Path) -> None:
    with redis_server() as server, Worker(*_options(server.url, f"sqlite:///{tmp_path}/a.db", "n")).ready() as worker:
        worker.post("/v1/conversations", id="c")
        with store_of(_options(server.url, f"sqlite:///{tmp_path}/a.db", "n")) as store:
            store.admin.archive()
        server.kill()
        refused = worker.post("/v1/conversations/c/turns", messages=[HI])
        assert said(refused) == (503, "WarmUnavailable")
        assert refused.headers["retry-after"] == "1"
        wait_for(lambda: worker.get("/readyz").status_code == 503)
        unready = worker.get("/readyz").json()
        assert unready["sql"] == "answers"
        assert str(server.port) in unready["redis"]
        assert worker.get("/readyz", params={"need": "sql"}).status_code == 200
        assert worker.get("/healthz").status_code == 200
        server.start()
        wait_for(lambda: worker.post("/v1/conversations/c/turns", messages=[HI]).status_code == 200)
        wait_for(lambda: worker.get("/readyz").status_code == 200)
        assert worker.end() == 0


@pytest.mark.wide
def test_without_sql_it_is_not_ready_and_serves_what_is_in_redis(servers: Any, namespace: str) -> None:
    with postgres_server() as server:
        options = _options(servers.redis("valkey").url, server.url, namespace)
        with Worker(*options).ready() as worker:
            worker.post("/v1/conversations", id="c")
            server.pause()
            wait_for(lambda: worker.get("/readyz").status_code == 503)
            assert worker.get("/readyz", params={"need": "redis"}).status_code == 200
            assert worker.post("/v1/conversations/c/turns", messages=[HI]).status_code == 200
            server.resume()
            wait_for(lambda: worker.get("/readyz").status_code == 200)
            server.pause()
            assert worker.post("/v1/conversations/c/turns", messages=[HI]).status_code == 200
            assert worker.end() == 0, "it does not wait for a server that is silent"
            server.resume()
        with store_of(options) as store:
            assert store.session("c").version(fresh=True) == 3


@pytest.mark.wide
def test_while_sql_is_silent_unknown_tokens_wait_for_a_while_and_known_ones_are_served(
    servers: Any, namespace: str
) -> None:
    """The strangers are three times as many as may wait, and 503 or 429 is all that any of them is told."""
    with postgres_server() as server:
        options = _options(servers.redis("valkey").url, server.url, namespace)
        known = CliRunner().invoke(shell.app, [*options, "token", "create", "--all-tenants"]).stdout.strip()
        with Worker(*options, "--tokens", "--max-requests", "10").ready() as worker, ExitStack() as asking:
            worker.http.headers["Authorization"] = f"Bearer {known}"
            assert worker.post("/v1/conversations", id="c").status_code == 201
            server.pause()
            # All at once, however busy the machine is: who comes late finds a place that was given up.
            asked = [asking.enter_context(raw(worker)) for _ in range(30)]
            for each in asked:
                each.settimeout(30)
                head = "GET /v1/conversations HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                each.sendall(f"{head}Authorization: Bearer {access_tokens.make()[1]}\r\n\r\n".encode())
            assert worker.post("/v1/conversations/c/turns", messages=[HI]).status_code == 200
            assert worker.get("/healthz").status_code == 200
            found = [int(answered(each).split(b" ")[1]) for each in asked]
            assert set(found) == {503, 429}
            assert found.count(429) >= 10
            server.resume()
            assert worker.end() == 0


@pytest.mark.wide
def test_a_redis_that_is_silent_does_not_hold_up_the_health_checks(tmp_path: Path) -> None:
    with redis_server() as server:
        options = _options(server.url, f"sqlite:///{tmp_path}/a.db", "n")
        with Worker(*options, "--timeout", "1").ready() as worker:
            worker.post("/v1/conversations", id="c")
            server.pause()
            refused = worker.post("/v1/conversations/c/turns", messages=[HI])
            assert said(refused) == (503, "Unavailable")
            with ThreadPoolExecutor(8) as pool:
                began = time.monotonic()
                codes = {each.status_code for each in pool.map(worker.get, ["/readyz", "/healthz"] * 8)}
                assert codes == {200, 503}
                assert time.monotonic() - began < 12
            server.resume()
            wait_for(lambda: worker.get("/readyz").status_code == 200)
            server.pause()
            began = time.monotonic()
            assert worker.end() == 0
            assert time.monotonic() - began < 20


# Events


class Reader(threading.Thread):
    """Reads a stream of events: (id, type, data) of each, and all positions told."""

    def __init__(self, url: str, *, since: str | None = None, last: str | None = None, types: str = "") -> None:
        super().__init__(daemon=True)
        self.url, self.since, self.last, self.types = url, since, last, types
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.positions: list[str] = []
        self.comments = 0
        self.stopped = False
        self.ended: BaseException | None = None
        self.start()
        wait_for(lambda: self.positions or self.ended)

    def run(self) -> None:
        headers = {"Last-Event-ID": self.last} if self.last is not None else {}
        asked = {name: value for name, value in (("since", self.since), ("types", self.types)) if value}
        try:
            with httpx.stream("GET", f"{self.url}/v1/events", params=asked, headers=headers, timeout=60) as response:
                assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
                block: dict[str, str] = {}
                for line in response.iter_lines():
                    if not line:
                        self._take(block)
                        block = {}
                        if self.stopped:
                            return
                    name, _, value = line.partition(":")
                    self.comments += line.startswith(":")
                    block[name] = value.strip()
        except httpx.TransportError as error:
            self.ended = error

    def _take(self, block: dict[str, str]) -> None:
        if "id" in block:
            self.positions.append(block["id"])
        if "data" in block:
            self.events.append((self.positions[-1], block["event"], json.loads(block["data"])))

    @property
    def numbers(self) -> list[int]:
        return [data["data"]["n"] for _, type, data in self.events if type == "a.b"]


@pytest.mark.wide
def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice(options: tuple[str, ...]) -> None:
    """Cut off again and again while events are written, it goes on at whichever worker."""
    total, seen, stop = 600, list[int](), threading.Event()
    with Worker(*options).ready() as one, Worker(*options).ready() as other, store_of(options) as store:

        def write() -> None:
            for n in range(total):
                store.emit("a.b", {"n": n}, subject=f"s{n % 50}")
                stop.wait(0.001)

        writer = threading.Thread(target=write)
        reader = Reader(one.url, types="a.*")
        writer.start()
        lives = 0
        while len(seen) < total:
            wait_for(lambda: len(reader.numbers) >= 20 or len(seen) + len(reader.numbers) == total)  # noqa: B023
            reader.stopped = True
            store.emit("a.c")  # wakes a reader that has got all
            reader.join(20)
            seen += reader.numbers
            lives += 1
            reader = Reader((one, other)[lives % 2].url, last=reader.events[-1][0], types="a.*")
        writer.join()
        reader.stopped = True
        store.emit("a.c")
        for each in (one, other):
            wait_for(lambda: each.figure("distributed_state_http_event_streams") == 0)  # noqa: B023
    assert sorted(seen) == list(range(total))
    assert [n for n in seen if n % 50 == 7] == list(range(7, total, 50)), "in order"
    assert lives > 3


@pytest.mark.wide
def test_a_reader_that_says_nothing_of_where_it_was_misses_some(
    shared: Worker, shared_options: tuple[str, ...]
) -> None:
    """The negative control of the test before."""
    with store_of(shared_options) as store:
        first = Reader(shared.url, types="a.b")
        store.emit("a.b", {"n": 1})
        wait_for(lambda: first.events)
        store.emit("a.b", {"n": 2})
        forgetful = Reader(shared.url, types="a.b")
        faithful = Reader(shared.url, last=first.events[0][0], since="oldest", types="a.b")
        store.emit("a.b", {"n": 3})
        wait_for(lambda: forgetful.numbers and len(faithful.numbers) == 2)
        assert (forgetful.numbers, faithful.numbers) == ([3], [2, 3])


def test_events_are_cloud_events_of_the_types_asked_for(shared: Worker) -> None:
    reader = Reader(shared.url, types="conversation.*,session.phase")
    shared.post("/v1/conversations", id="cloud")
    shared.post("/v1/conversations/cloud/turns", event="new_task")
    shared.http.delete("/v1/conversations/cloud")
    wait_for(lambda: len(reader.events) == 3)
    assert [type for _, type, _ in reader.events] == ["conversation.created", "session.phase", "conversation.deleted"]
    assert all(data["specversion"] == "1.0" and data["subject"] == "session:cloud" for *_, data in reader.events)


@pytest.mark.wide
def test_a_quiet_stream_shows_that_it_lives_and_moves_on(options: tuple[str, ...]) -> None:
    with Worker(*options, "--heartbeat", "0.1").ready() as worker:
        reader = Reader(worker.url, types="conversation.deleted")
        wait_for(lambda: reader.comments > 2)
        before = reader.positions[-1]
        worker.post("/v1/conversations", id="c")
        wait_for(lambda: reader.positions[-1] != before)
        assert reader.events == []
        assert worker.end() == 0
        reader.join(20)
        assert reader.ended is None, "the stream was ended, not broken off"


@pytest.mark.wide
def test_a_slow_reader_is_disconnected_and_goes_on_later(options: tuple[str, ...]) -> None:
    size, total = 60_000, 400
    with Worker(*options, "--slow", "0.5").ready() as worker, store_of(options) as store:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(worker.url.rpartition(":")[2])))
            slow.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: worker.figure("distributed_state_http_event_streams") == 1)
            for n in range(total):
                store.emit("a.b", {"n": n, "text": "x" * size}, subject="s")
            wait_for(lambda: worker.figure("distributed_state_http_event_streams") == 0)
            assert worker.get("/readyz").status_code == 200
            text = _all(slow)
        blocks = _blocks(text)
        positions = [line[4:] for line in blocks.splitlines() if line.startswith("id: ")]
        got = [json.loads(line[6:])["data"]["n"] for line in blocks.splitlines() if line.startswith("data: ")]
        assert len(got) < total, "so much is not under way at once"
        reader = Reader(worker.url, last=positions[-1])
        wait_for(lambda: len(reader.numbers) + len(got) >= total)
        assert got + reader.numbers == list(range(total))
        worker.end()
        assert worker.process.stderr is not None
        assert worker.process.stderr.read() == ""


def _all(connection: socket.socket) -> bytes:
    parts = []
    connection.settimeout(20)
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def _blocks(text: bytes) -> str:
    """The whole blocks of an answer that may be cut off."""
    rest, parts = text.partition(b"\r\n\r\n")[2], []
    while rest:
        head, _, rest = rest.partition(b"\r\n")
        length = int(head or b"0", 16)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(parts).decode().rpartition("\n\n")[0]


@pytest.mark.wide
def test_a_reader_is_told_where_redis_lost_events(tmp_path: Path) -> None:
    with redis_server() as server:
        options = _options(server.url, f"sqlite:///{tmp_path}/a.db", "n")
        with Worker(*options).ready() as worker:
            worker.post("/v1/conversations", id="c")
            reader = Reader(worker.url, since="oldest", types="conversation.*")
            wait_for(lambda: reader.events)
            _empty(server)
            wait_for(lambda: [type for _, type, _ in reader.events[1:]] == ["resync"])
            again = Reader(worker.url, last=reader.positions[-1], types="conversation.*")
            worker.post("/v1/conversations", id="d")
            wait_for(lambda: again.events and len(reader.events) == 3)
            assert [type for _, type, _ in again.events] == ["conversation.created"]


def _empty(server: RedisServer) -> None:
    import redis

    with redis.Redis.from_url(server.url) as client:
        client.flushall()


# Who is let in


@pytest.mark.wide
def test_a_worker_with_tokens_has_health_and_metrics_on_a_port_of_their_own(options: tuple[str, ...]) -> None:
    made = CliRunner().invoke(shell.app, [*options, "token", "create", "--tenant", "acme", "--rights", "read,write"])
    with Worker(*options, "--tokens", "--ops-port", "0", "--host", "0.0.0.0", "--notice", "0.05").ready() as worker:
        ops = worker.reported("health and metrics on ")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert worker.get(path).status_code == 404
            assert httpx.get(ops + path).status_code == 200
        assert worker.post("/v1/conversations", id="acme:c1").status_code == 401
        authorized = {"Authorization": f"Bearer {made.stdout.strip()}"}
        assert worker.http.post("/v1/conversations", json={"id": "acme:c1"}, headers=authorized).status_code == 201
        assert httpx.get(ops + "/v1/conversations").status_code == 404
        assert worker.end() == 0


@pytest.mark.wide
def test_a_worker_for_everybody_has_to_be_asked_for_and_says_so(
    options: tuple[str, ...],
) -> None:
    refused = CliRunner().invoke(shell.app, [*options, "serve", "--host", "0.0.0.0", "--port", "0"])
    assert refused.exit_code == 1
    assert "without authentication" in refused.stderr
    with Worker(*options, "--host", "0.0.0.0", "--insecure", "--notice", "0.05").ready() as worker:
        assert worker.post("/v1/conversations", id="c1").status_code == 201
        assert worker.get("/v1/conversations/c1", headers={"Host": "anything.example"}).status_code == 200
        worker.end()
        assert "INSECURE" in worker.process.communicate()[1]
