"""Turns that run, over HTTP: followed, stopped and given messages at any worker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import served

from distributed_state import StateStore, Stopped
from distributed_state.programs.servers import redis_server, wait_until
from distributed_state.programs.service import Access, Limits, Service, callers_policy
from distributed_state.programs.service.authentication import Authentication
from distributed_state.results import Chunk, Ended, Failed
from distributed_state.values import access_tokens

ONE = "/v1/conversations/acme:c"
Event = tuple[str, Any, str]


class Fleet:
    """Two workers, and a store beside them, on one Redis."""

    def __init__(self, first: httpx.Client, second: httpx.Client, store: StateStore) -> None:
        self.first, self.second, self.store = first, second, store
        self.session = store.session("acme:c")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture
def fleet(url: str, tmp_path: Path) -> Iterator[Fleet]:
    with opened(url, tmp_path) as found:
        yield found


@contextmanager
def opened(url: str, folder: Path, limits: Limits | None = None, **settings: Any) -> Iterator[Fleet]:
    archive, namespace = f"sqlite:///{folder}/a.db", folder.name
    own = [Service(limits or Limits(busy=0.3, heartbeat=1.0), Authentication(Access(tokens=True))) for _ in range(2)]
    settings = {"stream_interval": 0.0} | settings
    shared: dict[str, Any] = {"access": callers_policy(), **settings}
    with (
        StateStore.open(url, archive=archive, namespace=namespace, **settings) as store,
        served(url, archive, namespace, service=own[0], **shared) as first,
        served(url, archive, namespace, service=own[1], **shared) as second,
    ):
        for each in (first, second):
            each.headers["Authorization"] = f"Bearer {token(store)}"
        assert first.post("/v1/conversations", json={"id": "acme:c"}).status_code == 201
        yield Fleet(first, second, store)


def token(store: StateStore, *rights: str, tenant: str = "acme:") -> str:
    """A new token."""
    id, text = access_tokens.make()
    given = rights or ("read", "write")
    tokens = store._core._lifecycle.cold.access_tokens
    tokens.add(id, access_tokens.digest(text), prefix=tenant, rights=given, actor="web", seconds=3600.0)
    return text


def revoke(store: StateStore, text: str) -> None:
    store._core._lifecycle.cold.access_tokens.revoke(access_tokens.id_of(text))


class Following:
    """A client of an event stream: its events, until it is left."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> Event:
        """The next event that has data: its name, its data, and the position with which it came."""
        name, position = "message", ""
        for line in self._lines:
            field, _, text = line.partition(": ")
            if field == "event":
                name = text
            elif field == "id":
                position = text
            elif field == "data":
                return name, text if text == "[DONE]" else json.loads(text), position
        raise EOFError

    def until(self, *names: str) -> list[Event]:
        """The events up to the first one with one of these names."""
        found = [self.next()]
        while found[-1][0] not in names:
            found.append(self.next())
        return found

    def all(self) -> list[Event]:
        """The events up to the end of the stream."""
        found = []
        while True:
            try:
                found.append(self.next())
            except EOFError:
                return found


@contextmanager
def follow(
    client: httpx.Client, *, after: str | None = None, path: str = "/output", **query: Any
) -> Iterator[Following]:
    headers = {} if after is None else {"Last-Event-ID": after}
    with client.stream("GET", ONE + path, params=query, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Following(response)


def streamed(fleet: Fleet, request: str, *chunks: Any, outcome: Any = None) -> None:
    with fleet.session.turn(request_id=request) as turn:
        for chunk in chunks:
            turn.stream(chunk)
        turn["n"] = request
        turn.outcome = outcome


# Following


def test_chunks_and_the_end_are_followed_at_any_worker_and_resumed_at_another(fleet: Fleet) -> None:
    with follow(fleet.first, request="r") as following:
        streamed(fleet, "r", "Os", {"tool": 1}, b"\xff", outcome={"answer": "Oslo"})
        found = following.all()
    assert [(name, data) for name, data, _ in found] == [
        ("chunk", {"value": "Os"}),
        ("chunk", {"value": {"tool": 1}}),
        ("chunk", {"bytes": "/w=="}),
        ("ended", {"version": 2, "outcome": {"answer": "Oslo"}}),
    ]
    for at, (_, _, position) in enumerate(found[:-1]):
        with follow(fleet.second, request="r", after=position) as again:
            assert again.all() == found[at + 1 :]
    assert fleet.second.get(f"{ONE}/output?request=r", headers={"Last-Event-ID": found[-1][2]}).status_code == 204


def test_without_a_request_the_next_turns_are_followed_too(fleet: Fleet) -> None:
    with follow(fleet.first) as following:
        streamed(fleet, "a", "1")
        first = following.until("ended")
        streamed(fleet, "b", "2")
        second = following.until("ended")
    assert [[data for _, data, _ in each] for each in (first, second)] == [
        [{"value": "1"}, {"version": 2, "outcome": None}],
        [{"value": "2"}, {"version": 3, "outcome": None}],
    ]


def test_a_client_that_comes_back_after_the_last_end_follows_the_next_turn(fleet: Fleet) -> None:
    with follow(fleet.first) as following:
        streamed(fleet, "a", "1")
        *_, end = following.until("ended")
    with follow(fleet.second, after=end[2]) as again:
        streamed(fleet, "b", "2")
        assert [data for _, data, _ in again.until("ended")] == [{"value": "2"}, {"version": 3, "outcome": None}]


def test_a_failed_attempt_and_the_next_one_are_told(fleet: Fleet) -> None:
    with pytest.raises(ZeroDivisionError), fleet.session.turn(request_id="r") as turn:
        turn.stream("half")
        raise ZeroDivisionError
    with follow(fleet.first, request="r") as following:
        failed = following.all()
    assert fleet.first.get(f"{ONE}/output?request=r", headers={"Last-Event-ID": failed[-1][2]}).status_code == 204
    streamed(fleet, "r", "whole")
    with follow(fleet.second, request="r", after=failed[-1][2]) as following:
        rest = following.all()
    assert [name for name, _, _ in [*failed, *rest]] == ["chunk", "failed", "restarted", "chunk", "ended"]


def test_notices_tell_a_second_client_what_to_read_again(fleet: Fleet) -> None:
    with follow(fleet.first, notices="true") as following:
        assert following.next()[0] == "resync"
        with fleet.session.turn(request_id="r") as turn:
            turn.stream("a")
            turn.append({"role": "assistant", "content": "a"})
            turn["field"] = 1
        found = following.until("message.appended")
        fleet.session.post({"role": "user", "content": "secret"})
        found += following.until("inbox.posted")
    told = {name: data for name, data, _ in found}
    assert told["message.appended"] == {"version": 2, "first": 0, "last": 0}
    assert told["fields.changed"] == {"version": 2, "names": ["field"], "items": [], "phase": False}
    assert told["inbox.posted"] == {"version": 3, "number": 1}
    assert told["turn.started"] == told["turn.ended"]
    assert "secret" not in repr(found)


def test_who_may_not_read_or_is_of_another_tenant_follows_nothing(fleet: Fleet) -> None:
    for rights, tenant in ((["write"], "acme:"), (["read"], "beta:")):
        other = {"Authorization": f"Bearer {token(fleet.store, *rights, tenant=tenant)}"}
        for path in ("/output", "/events", "/inbox"):
            assert fleet.first.get(ONE + path, headers=other).status_code == 403
        assert fleet.first.post(ONE + "/tickets", headers=other).status_code == 403
    reader = {"Authorization": f"Bearer {token(fleet.store, 'read')}"}
    for path, body in (("/stop", {}), ("/inbox", {"message": {"role": "user"}}), ("/output", {"first": 1})):
        assert fleet.first.post(ONE + path, json=body, headers=reader).status_code == 403
    assert fleet.first.delete(ONE + "/inbox/1", headers=reader).status_code == 403


def test_a_stream_ends_when_its_token_is_revoked(fleet: Fleet) -> None:
    text = token(fleet.store, "read")
    with fleet.first.stream("GET", ONE + "/output", headers={"Authorization": f"Bearer {text}"}) as response:
        revoke(fleet.store, text)
        assert not Following(response).all()


def test_more_followers_than_there_are_places_for_are_refused(url: str, tmp_path: Path) -> None:
    with opened(url, tmp_path, Limits(followers=2, heartbeat=0.2)) as fleet, follow(fleet.first):
        assert fleet.first.get(ONE + "/output").status_code == 429, "a tenant has half of what is free"
        with follow(fleet.first, path="/events"):
            pass


def test_a_stopping_worker_ends_its_streams(url: str, tmp_path: Path) -> None:
    archive = f"sqlite:///{tmp_path}/a.db"
    service = Service(Limits())
    with served(url, archive, tmp_path.name, service=service) as client:
        assert client.post("/v1/conversations", json={"id": "acme:c"}).status_code == 201
        with follow(client) as following:
            for each, (_, _, watching) in [*service._streams.items()]:
                watching.get_loop().call_soon_threadsafe(each.end)
            assert following.all() == []


# The UI message stream


def test_the_ai_sdk_is_given_the_running_turn_from_its_beginning(fleet: Fleet) -> None:
    for query in ("", "&notices=true"):
        assert fleet.first.get(f"{ONE}/output?format=ai-sdk{query}").status_code == 204, "nothing runs"
    with fleet.session.turn(request_id="r") as turn:
        for chunk in ("Os", "lo", {"type": "data-weather", "data": 7}, {"tool": 1}, "!"):
            turn.stream(chunk)
        read = Read(fleet.first, format="ai-sdk")
        wait_until(lambda: read.found, "it follows")
        turn["n"] = 1
    found = [data for _, data, _ in read.end()]
    assert read.headers["x-vercel-ai-ui-message-stream"] == "v1"
    assert found[0] == {"type": "start", "messageId": f"turn-{turn.token}"}
    assert found[1:] == [
        {"type": "text-start", "id": "1"},
        {"type": "text-delta", "id": "1", "delta": "Os"},
        {"type": "text-delta", "id": "1", "delta": "lo"},
        {"type": "text-end", "id": "1"},
        {"type": "data-weather", "data": 7},
        {"type": "data-chunk", "data": {"value": {"tool": 1}}},
        {"type": "text-start", "id": "2"},
        {"type": "text-delta", "id": "2", "delta": "!"},
        {"type": "text-end", "id": "2"},
        {"type": "finish"},
        "[DONE]",
    ]


@pytest.mark.parametrize("streams", [True, False])
def test_the_ai_sdk_waits_for_a_turn_that_has_not_streamed_yet(fleet: Fleet, streams: bool) -> None:
    with fleet.session.turn() as turn:
        read = Read(fleet.first, format="ai-sdk")
        wait_until(lambda: read.headers, "the page was reloaded while the model thinks")
        if streams:
            turn.stream("Oslo")
        turn["n"] = 1
    found = [data if data == "[DONE]" else data["type"] for _, data, _ in read.end()]
    begun = ["start", "text-start", "text-delta", "text-end", "finish"]
    assert found == [*(begun if streams else []), "[DONE]"]


def test_the_ai_sdk_waits_for_the_turn_of_a_request_that_it_names(fleet: Fleet) -> None:
    read = Read(fleet.first, format="ai-sdk", request="r")
    wait_until(lambda: read.headers, "the turn has not begun")
    streamed(fleet, "other", "no")
    streamed(fleet, "r", "yes")
    assert [data["delta"] for _, data, _ in read.end()[:-1] if "delta" in data] == ["yes"]


class Read:
    """A stream that is read in a thread."""

    def __init__(self, client: httpx.Client, **query: Any) -> None:
        self.found: list[Event] = []
        self.headers: Any = None
        self._thread = threading.Thread(target=self._read, args=(client, query))
        self._thread.start()

    def _read(self, client: httpx.Client, query: dict[str, Any]) -> None:
        with follow(client, **query) as following:
            self.headers = following.response.headers
            for each in iter(following.next, None):
                self.found.append(each)
                if each[1] == "[DONE]":
                    return

    def end(self) -> list[Event]:
        """All events, once the stream has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.found


# Stops


def test_a_turn_is_stopped_from_any_worker_and_keeps_what_it_has(fleet: Fleet) -> None:
    done: list[Any] = []

    def press() -> None:
        assert running.wait(20)
        done.append(fleet.second.post(ONE + "/stop", json={"request": "r", "reason": "enough"}).json())

    running = threading.Event()
    pressing = threading.Thread(target=press)
    pressing.start()
    with fleet.session.turn(request_id="r") as turn:
        running.set()
        with pytest.raises(Stopped, match="enough"):
            while True:
                turn.stream("x")
                time.sleep(0.01)
        turn["partial"] = True
    pressing.join(20)
    assert done == [{"state": "stopped", "version": 2}]
    assert fleet.first.post(ONE + "/stop", json={}).json() == {"state": "nothing ran", "version": None}
    with follow(fleet.first, request="r") as following:
        assert [name for name, _, _ in following.until("ended")][-2:] == ["stop_requested", "ended"]


def test_a_late_stop_that_names_a_token_leaves_the_next_turn_alone(fleet: Fleet) -> None:
    with follow(fleet.first, notices="true") as following:
        with fleet.session.turn(request_id="a") as turn:
            turn.stream("a")
            token = following.until("turn.started")[-1][1]["token"]
            turn["n"] = 1
        with fleet.session.turn(request_id="b") as turn:
            late = fleet.second.post(ONE + "/stop", json={"token": token, "wait": 0})
            assert late.json() == {"state": "nothing ran", "version": None}
            assert not turn.stopping
            asked = fleet.second.post(ONE + "/stop", json={"token": turn.token, "wait": 0})
            assert asked.json()["state"] == "stopping"
            with pytest.raises(Stopped), turn.stoppable():
                threading.Event().wait(20)
    assert fleet.second.post(ONE + "/stop", json={"token": 0}).status_code == 422


# The inbox


def test_a_message_is_left_read_withdrawn_and_served(fleet: Fleet) -> None:
    def post(text: str, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return fleet.first.post(ONE + "/inbox", json={"message": {"role": "user", "content": text}}, headers=headers)

    with fleet.session.turn(request_id="r") as turn:
        turn["n"] = 1
        assert [post("a", "k").status_code, post("a", "k").json(), post("b").json()] == [
            202,
            {"number": 1},
            {"number": 2},
        ]
    waiting = fleet.second.get(ONE + "/inbox").json()["inputs"]
    assert [(each["number"], each["request_id"], each["message"]["content"]) for each in waiting] == [
        (1, "k", "a"),
        (2, None, "b"),
    ]
    assert abs(waiting[0]["time"] - time.time()) < 60
    assert fleet.second.delete(ONE + "/inbox/2").json() == {"withdrawn": True}
    assert fleet.second.delete(ONE + "/inbox/2").json() == {"withdrawn": False}
    body = {"inputs": [1], "messages": [{"role": "assistant", "content": "A"}], "request_id": "t"}
    assert fleet.first.post(ONE + "/turns", json=body).json()["version"] == 6
    assert fleet.second.get(ONE + "/inbox").json() == {"inputs": []}
    with follow(fleet.second, request="k") as following:
        assert following.all()[-1][:2] == ("ended", {"version": 6, "outcome": {"version": 6, "phase": None}})


def test_a_message_for_what_does_not_exist_or_was_deleted_is_refused(fleet: Fleet) -> None:
    body = {"message": {"role": "user", "content": "a"}}
    assert fleet.first.post("/v1/conversations/acme:none/inbox", json=body).status_code == 404
    fleet.first.delete(ONE, headers={"Authorization": f"Bearer {token(fleet.store, 'delete')}"})
    assert fleet.first.post(ONE + "/inbox", json=body).status_code == 410
    assert fleet.first.post(ONE + "/inbox", json={"message": "a"}).status_code == 422


def test_a_full_inbox_asks_to_come_back(url: str, tmp_path: Path) -> None:
    with opened(url, tmp_path, inbox_limit=1) as fleet:
        body = {"message": {"role": "user", "content": "a"}}
        assert fleet.first.post(ONE + "/inbox", json=body).status_code == 202
        refused = fleet.first.post(ONE + "/inbox", json=body)
        assert (refused.status_code, refused.json()["error"]) == (503, "Backpressure")


def test_a_message_names_the_handler_and_where_its_turn_is_followed(fleet: Fleet) -> None:
    body = {"message": {"role": "user", "content": "a"}, "handler": "support"}
    posted = fleet.first.post(ONE + "/inbox", json=body, headers={"Idempotency-Key": "k 1"})
    assert (posted.status_code, posted.headers["location"]) == (202, ONE + "/output?request=k%201")
    assert fleet.first.post(ONE + "/inbox", json=body | {"handler": "other"}).status_code == 409
    assert fleet.first.post(ONE + "/inbox", json=body | {"handler": "a b"}).status_code == 422
    fleet.store.handler("support", lambda turn: turn.append(*(each.message for each in turn.take())))
    working = threading.Thread(target=fleet.store.work)
    working.start()
    try:
        with follow(fleet.second, request="k 1") as following:
            assert following.all()[-1][0] == "ended"
    finally:
        fleet.store.stop_working()
        working.join(20)
    assert [each.content for each in fleet.session.messages(fresh=True)] == ["a"]


# A client that runs a turn


def test_a_client_streams_under_its_lease_and_its_turn_ends_the_output(fleet: Fleet) -> None:
    taken = fleet.first.post(ONE + "/lease", json={"turn": True, "request": "r"}).json()
    lease = {"Lease": taken["lease"]}

    def chunks(first: int, *values: Any, client: httpx.Client = fleet.first) -> httpx.Response:
        body = {"first": first, "chunks": [{"value": each} for each in values]}
        return client.post(ONE + "/output", json=body, headers=lease)

    assert chunks(1, "Os", "lo").json() == {"last": 2}
    assert chunks(1, "Os", "lo", client=fleet.second).json() == {"last": 2}, "repeated at another worker"
    assert chunks(3, "!").json() == {"last": 3}
    with follow(fleet.second, request="r") as following:
        body = {"request_id": "r", "set": {"n": 1}, "streamed": 3, "outcome": "Oslo!"}
        done = fleet.second.post(ONE + "/turns", json=body, headers=lease)
        assert done.json()["version"] == 2, done.text
        found = following.all()
    assert [(name, data) for name, data, _ in found] == [
        ("chunk", {"value": "Os"}),
        ("chunk", {"value": "lo"}),
        ("chunk", {"value": "!"}),
        ("ended", {"version": 2, "outcome": "Oslo!"}),
    ]
    assert fleet.first.delete(ONE + "/lease", headers=lease).json() == {"released": True}
    assert chunks(4, "late").status_code == 412
    assert fleet.first.post(ONE + "/output", json={"first": 1, "chunks": [{"value": "x"}]}).status_code == 422
    assert fleet.first.post(ONE + "/turns", json={"set": {"n": 1}, "streamed": 1}).status_code == 422


@pytest.mark.parametrize(("failed", "last"), [(False, Ended), (True, Failed)])
def test_a_client_that_releases_without_a_commit_ends_the_output(fleet: Fleet, failed: bool, last: type) -> None:
    taken = fleet.first.post(ONE + "/lease", json={"turn": True, "request": "r"}).json()
    lease = {"Lease": taken["lease"]}
    fleet.first.post(ONE + "/output", json={"first": 1, "chunks": [{"value": "a"}]}, headers=lease)
    fleet.first.delete(ONE + "/lease", params={"streamed": 1, "failed": failed}, headers=lease)
    with fleet.session.output("r", wait=5) as output:
        found = [output.next(5), output.next(5)]
    assert [type(each) for each in found] == [Chunk, last]


def test_a_client_that_is_asked_to_stop_is_told_with_its_next_chunk(fleet: Fleet) -> None:
    taken = fleet.first.post(ONE + "/lease", json={"turn": True, "request": "r"}).json()
    lease = {"Lease": taken["lease"]}
    body = {"first": 1, "chunks": [{"value": "a"}]}
    assert fleet.first.post(ONE + "/output", json=body, headers=lease).status_code == 200
    asked = fleet.second.post(ONE + "/stop", json={"request": "r", "wait": 0})
    assert asked.json()["state"] == "stopping"
    told = fleet.first.post(ONE + "/output", json=body | {"first": 2}, headers=lease)
    assert (told.status_code, told.json()["error"]) == (409, "Stopped")
    assert fleet.first.post(ONE + "/output", json=body | {"first": 2}, headers=lease).json() == {"last": 2}
    done = fleet.first.post(ONE + "/turns", json={"set": {"n": 1}, "request_id": "r", "streamed": 2}, headers=lease)
    assert done.json()["version"] == 2
    with follow(fleet.second, request="r") as following:
        assert [name for name, _, _ in following.all()] == ["chunk", "chunk", "stop_requested", "ended"]


def test_a_client_that_releases_after_a_stop_is_shown_as_stopped(fleet: Fleet) -> None:
    taken = fleet.first.post(ONE + "/lease", json={"turn": True, "request": "r"}).json()
    lease = {"Lease": taken["lease"]}
    body = {"first": 1, "chunks": [{"value": "a"}]}
    assert fleet.first.post(ONE + "/output", json=body, headers=lease).status_code == 200
    asked = fleet.second.post(ONE + "/stop", json={"token": taken["token"], "reason": "enough", "wait": 0})
    assert asked.json()["state"] == "stopping"
    assert fleet.first.post(ONE + "/output", json=body | {"first": 2}, headers=lease).status_code == 409
    fleet.first.delete(ONE + "/lease", params={"streamed": 1, "failed": True}, headers=lease)
    with follow(fleet.second, request="r") as following:
        assert [(name, data) for name, data, _ in following.all()] == [
            ("chunk", {"value": "a"}),
            ("stop_requested", {"reason": "enough"}),
            ("ended", {"version": None, "outcome": None}),
        ]


def test_a_client_that_takes_a_posted_input_is_followed_by_its_request(fleet: Fleet) -> None:
    fleet.session.post({"role": "user", "content": "q"}, request_id="q")
    with follow(fleet.second, request="q") as following:
        taken = fleet.first.post(ONE + "/lease", json={"turn": True}).json()
        lease = {"Lease": taken["lease"]}
        body = {"first": 1, "inputs": [1], "chunks": [{"value": "a"}]}
        assert fleet.first.post(ONE + "/output", json=body, headers=lease).json() == {"last": 2}
        done = fleet.first.post(ONE + "/turns", json={"inputs": [1], "streamed": 2}, headers=lease)
        assert done.json()["version"] == 3, done.text
        assert [(name, data) for name, data, _ in following.all()] == [
            ("chunk", {"value": "a"}),
            ("ended", {"version": 3, "outcome": None}),
        ]


@pytest.mark.parametrize(
    "body",
    [
        {"first": 0, "chunks": [{"value": 1}]},
        {"first": 1},
        {"first": 1, "chunks": [{"value": 1, "bytes": "/w=="}]},
        {"first": 1, "chunks": [{"bytes": "?"}]},
        {"first": 1, "chunks": [{"text": "a"}]},
    ],
)
def test_chunks_that_cannot_be_read_are_refused(fleet: Fleet, body: dict[str, Any]) -> None:
    taken = fleet.first.post(ONE + "/lease", json={"turn": True, "request": "r"}).json()
    assert fleet.first.post(ONE + "/output", json=body, headers={"Lease": taken["lease"]}).status_code == 422


# Tickets


def test_a_ticket_opens_one_stream_and_resumes_it(fleet: Fleet) -> None:
    made = fleet.first.post(ONE + "/tickets").json()
    bare = httpx.Client(base_url=fleet.second.base_url, timeout=20)
    streamed(fleet, "r", "a", "b")
    with bare, follow(bare, ticket=made["ticket"], request="r") as following:
        found = following.all()
        assert [name for name, _, _ in found] == ["chunk", "chunk", "ended"]
        again = bare.get(ONE + "/output", params={"ticket": made["ticket"]})
        assert (again.status_code, again.json()["error"]) == (401, "Unauthenticated")
        for after, count in (("beginning", 3), (found[0][2], 2)):
            with follow(bare, ticket=made["ticket"], request="r", after=after) as resumed:
                assert len(resumed.all()) == count
        other = bare.get("/v1/conversations/acme:d/output", params={"ticket": made["ticket"]})
        assert other.status_code == 401
        assert bare.post(ONE + "/stop", params={"ticket": made["ticket"]}, json={}).status_code == 401
        assert bare.get(ONE + "/inbox", params={"ticket": made["ticket"]}).status_code == 401
        assert bare.get(ONE + "/output", params={"ticket": "x"}).status_code == 401


def test_a_ticket_is_worth_nothing_once_its_token_is_revoked_or_its_minute_is_over(fleet: Fleet, url: str) -> None:
    text = token(fleet.store, "read")
    asked = {"Authorization": f"Bearer {text}"}
    late, used = (fleet.first.post(ONE + "/tickets", headers=asked).json()["ticket"] for _ in range(2))
    with httpx.Client(base_url=fleet.second.base_url, timeout=20) as bare:
        keys = fleet.store._core._lifecycle.tiers().keys
        with follow(bare, ticket=used) as following:
            revoke(fleet.store, text)
            assert following.all() == []
        resumed = bare.get(ONE + "/output", params={"ticket": used}, headers={"Last-Event-ID": "beginning"})
        assert resumed.status_code == 401
        assert keys
        assert bare.get(ONE + "/output", params={"ticket": late}).status_code == 401


# The events of one conversation


def test_events_of_one_conversation_need_only_the_right_to_read(fleet: Fleet) -> None:
    reader = {"Authorization": f"Bearer {token(fleet.store, 'read')}"}
    assert fleet.first.get("/v1/events", headers=reader).status_code == 403
    with fleet.first.stream("GET", ONE + "/events", headers=reader) as response:
        following = Following(response)
        fleet.store.session("acme:other").set("n", 1)
        fleet.store.emit("other.thing", {}, subject=fleet.store.session("acme:other"))
        fleet.store.emit("own.thing", {"n": 1}, subject=fleet.session)
        name, data, _ = following.next()
    assert (name, data["data"]) == ("own.thing", {"n": 1})


# Servers and workers


@pytest.mark.parametrize("warm", ["cluster", "sentinel"])
@pytest.mark.parametrize(
    "check",
    [
        test_chunks_and_the_end_are_followed_at_any_worker_and_resumed_at_another,
        test_notices_tell_a_second_client_what_to_read_again,
        test_a_turn_is_stopped_from_any_worker_and_keeps_what_it_has,
        test_a_message_is_left_read_withdrawn_and_served,
        test_a_client_streams_under_its_lease_and_its_turn_ends_the_output,
        test_a_ticket_opens_one_stream_and_resumes_it,
    ],
)
def test_a_cluster_and_sentinels_do_the_same(
    servers: Any, tmp_path: Path, warm: str, check: Callable[[Fleet], None]
) -> None:
    with opened(servers.warm(warm), tmp_path) as fleet:
        check(fleet)


def test_a_follower_goes_on_where_it_was_after_a_restart_of_all_workers(url: str, tmp_path: Path) -> None:
    archive, namespace = f"sqlite:///{tmp_path}/a.db", tmp_path.name
    found: list[Event] = []

    def read(until: int) -> None:
        """Follow at two new workers in turn, each ended afterwards, until so many events came."""
        for _ in range(2):
            with served(url, archive, namespace, service=Service(Limits(busy=0.3))) as worker:
                after = found[-1][2] if found else None
                with follow(worker, request="r", after=after) as following:
                    while len(found) < until:
                        found.append(following.next())
            until += 1

    with StateStore.open(url, archive=archive, namespace=namespace, stream_interval=0.0) as store:
        session = store.session("acme:c")
        session.create({"n": 0})
        with session.turn(request_id="r") as turn:
            for number in range(6):
                turn.stream(number)
            read(2)
            for number in range(6, 10):
                turn.stream(number)
            read(8)
            turn["n"] = 1
        with served(url, archive, namespace) as worker, follow(worker, request="r", after=found[-1][2]) as following:
            found += following.all()
    assert [data for _, data, _ in found[:-1]] == [{"value": number} for number in range(10)]
    assert found[-1][:2] == ("ended", {"version": 2, "outcome": None})
