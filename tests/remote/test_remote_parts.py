"""What the remote store does by itself: what it repeats, what it makes of an answer, who is shown a token."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distributed_state import (
    AccessDenied,
    AsyncItems,
    AsyncRecord,
    AsyncSession,
    AsyncStateStore,
    Backpressure,
    ConfigurationError,
    Conflict,
    Deleted,
    DurabilityUnknown,
    Fenced,
    InvalidValue,
    Locked,
    LockTimeout,
    NotFound,
    PutItem,
    StateError,
    StateStore,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WarmUnavailable,
)
from distributed_state.adapters.stores import open_store
from distributed_state.port.http import AsyncHttp, BlockingHttp, HttpAnswer, HttpPlace, Unanswered
from distributed_state.records.sanitizing import SessionOptions
from distributed_state.remote import values
from distributed_state.remote.blocking import RemoteStore
from distributed_state.remote.record import AsyncRemoteItems, AsyncRemoteRecord, RemoteTransaction
from distributed_state.remote.requests import KEY, TOKEN, TOKEN_FILE, Requests, State, address, refusal
from distributed_state.remote.session import AsyncRemoteSession
from distributed_state.remote.store import AsyncRemoteEvents, AsyncRemoteStore
from distributed_state.results import SessionInfo, TimedRun, TurnTimes
from distributed_state.values.model import Ref

pytestmark = pytest.mark.unit

SECRET = "dst_a-very-secret-word"
DONE = HttpAnswer(200, {}, b'{"version": 7}')


def refused(status: int, error: str = "", after: str = "", detail: str = "why", **more: Any) -> HttpAnswer:
    headers = {"content-type": "application/problem+json"} | ({"retry-after": after} if after else {})
    return HttpAnswer(status, headers, json.dumps({"error": error, "detail": detail, **more}).encode())


class Lines:
    """A stream of what was heard; where that ends, of nothing."""

    def __init__(self, *received: str | HttpAnswer | Unanswered | None) -> None:
        self.received = [*received]
        self.closed = False

    async def line(self, timeout: float) -> str | HttpAnswer | None:
        if not self.received:
            raise TimeoutError
        found = self.received.pop(0)
        if isinstance(found, Unanswered):
            raise found
        return found

    async def close(self) -> None:
        self.closed = True


class Scripted:
    """A transport that answers as it is told, and keeps what it was sent and how long it slept."""

    def __init__(self, *answers: HttpAnswer | Unanswered) -> None:
        self.answers = [*answers]
        self.sent: list[tuple[str, str, Mapping[str, str]]] = []
        self.bodies: list[bytes | None] = []
        self.streams: list[Lines] = []
        self.stopped = 0
        self.slept: list[float] = []

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> HttpAnswer:
        self.sent.append((method, path, headers))
        self.bodies.append(body)
        found = self.answers.pop(0)
        if isinstance(found, Unanswered):
            raise found
        return found

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def lines(self, path: str, headers: Mapping[str, str], silent: float) -> Any:
        self.sent.append(("GET", path, headers))
        return self.streams.pop(0)

    def every(self, seconds: float, work: Callable[[], Any]) -> Callable[[], None]:
        def stop() -> None:
            self.stopped += 1

        return stop

    def monotonic(self) -> float:
        return sum(self.slept)

    async def close(self) -> None: ...


def asking(*answers: HttpAnswer | Unanswered, retry_for: float = 60.0) -> tuple[Requests, Scripted]:
    http = Scripted(*answers)
    return Requests(http, retry_for=retry_for, timeout=1.0), http


LOST = Unanswered("ReadError: broken", sent=True)
UNSENT = Unanswered("ConnectError: refused", sent=False)


async def test_a_write_is_sent_again_under_the_same_key() -> None:
    requests, http = asking(LOST, UNSENT, refused(502), refused(503, "WarmUnavailable"), DONE)
    assert await requests.write("POST", "/x", {}) == {"version": 7}
    assert len({headers[KEY] for _, _, headers in http.sent}) == 1
    await asking_again_is_another_request(requests, http)


async def asking_again_is_another_request(requests: Requests, http: Scripted) -> None:
    http.answers.append(DONE)
    await requests.write("POST", "/x", {})
    assert len({headers[KEY] for _, _, headers in http.sent}) == 2


async def test_what_has_no_key_is_sent_again_only_if_it_did_not_arrive() -> None:
    requests, http = asking(UNSENT, refused(429, "Backpressure"), LOST)
    with pytest.raises(Unavailable, match="the request may or may not have been applied"):
        await requests.order("POST", "/x", {})
    assert len(http.sent) == 3
    requests, http = asking(refused(503, "Backpressure"), DONE)
    await requests.order("POST", "/x", {})
    requests, http = asking(refused(503, "WarmUnavailable"))
    with pytest.raises(WarmUnavailable):
        await requests.order("POST", "/x", {})


async def test_it_waits_as_long_as_the_service_says_and_no_longer_than_it_may() -> None:
    requests, http = asking(refused(429, "Backpressure", "3"), refused(503, "Unavailable", "2"), DONE)
    await requests.read("/x")
    assert [3 <= http.slept[0] <= 3.4, 2 <= http.slept[1] <= 2.3] == [True, True]
    requests, http = asking(refused(429, "Backpressure", "30"), retry_for=10.0)
    with pytest.raises(Backpressure):
        await requests.read("/x")
    assert http.slept == []


async def test_what_is_refused_for_good_is_not_asked_again() -> None:
    for answer in (refused(404, "NotFound"), refused(409, "Conflict"), refused(503, "DurabilityUnknown")):
        requests, http = asking(answer)
        with pytest.raises(StateError):
            await requests.write("POST", "/x", {})
        assert len(http.sent) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refused(401, "Unauthenticated"), Unauthenticated),
        (HttpAnswer(401, {}, b""), Unauthenticated),
        (refused(403, "AccessDenied"), AccessDenied),
        (refused(404, "NotFound"), NotFound),
        (refused(404, "NotFound", detail="Not Found"), ConfigurationError),
        (HttpAnswer(404, {"content-type": "text/html"}, b"<h1>none</h1>"), ConfigurationError),
        (refused(405, "MethodNotAllowed"), ConfigurationError),
        (HttpAnswer(302, {"location": "https://elsewhere"}, b""), ConfigurationError),
        (refused(412, "Fenced"), Fenced),
        (HttpAnswer(413, {}, b""), TooLarge),
        (refused(429, "Backpressure"), Backpressure),
        (HttpAnswer(502, {}, b"bad gateway"), Unavailable),
        (refused(500, "InternalError"), StateError),
        (refused(500, "open"), StateError),
        (refused(500, "Any"), StateError),
    ],
)
def test_a_refusal_is_the_error_of_the_direct_store(answer: HttpAnswer, kind: type[StateError]) -> None:
    assert type(refusal(answer)) is kind


def test_errors_come_with_their_fields() -> None:
    conflict = refusal(refused(412, "Conflict", version=5))
    assert isinstance(conflict, Conflict)
    assert conflict.version == 5
    unknown = refusal(refused(503, "DurabilityUnknown", version=3))
    assert isinstance(unknown, DurabilityUnknown)
    assert unknown.version == 3
    deleted = refusal(refused(410, "Deleted", version=4))
    assert isinstance(deleted, Deleted)
    assert (deleted.version, deleted.expired, deleted.begins_again) == (4, None, False)
    deleted = refusal(refused(410, "Deleted", version=4, expired=1.5, begins_again=True))
    assert isinstance(deleted, Deleted)
    assert (deleted.version, deleted.expired, deleted.begins_again) == (4, 1.5, True)
    odd = refusal(refused(412, "Conflict", version="5"))
    assert isinstance(odd, Conflict)
    assert odd.version == 0


# Events


def listening(*streams: Lines, retry_for: float = 10.0) -> tuple[AsyncRemoteEvents, Scripted]:
    requests, http = asking(retry_for=retry_for)
    http.streams = [*streams]
    return AsyncRemoteEvents(requests, ("a.*",), None), http


def sent(id: str) -> list[str]:
    data = {
        "id": id, "type": "a.b", "source": "r", "time": "2026-01-01T00:00:00+00:00", "data": {}, "sequence": 1,
        "epoch": "1", "partition": 0, "version": 1, "actor": "",
    }  # fmt: skip
    return [f"id: {id}", "event: a.b", f"data: {json.dumps(data)}", ""]


async def test_a_wait_that_ends_keeps_the_stream_and_what_was_heard_of_an_event() -> None:
    lines = Lines("retry: 1000", "id: p0", "", *sent("p1")[:2])
    events, http = listening(lines)
    for _ in range(3):
        assert await events.next(timeout=0.0) is None
    assert events.position == "p0"
    lines.received += sent("p1")[2:]
    event = await events.next(timeout=0.0)
    assert event is not None
    assert (event.id, events.position, len(http.sent), lines.closed) == ("p1", "p1", 1, False)


async def test_a_stream_that_broke_goes_on_behind_the_last_event() -> None:
    events, http = listening(Lines(*sent("p1"), "id: p2", LOST), Lines(refused(503, "Unavailable")), Lines(*sent("p2")))
    found = [await events.next(), await events.next()]
    assert [each and each.id for each in found] == ["p1", "p2"]
    assert [headers.get("Last-Event-ID") for _, _, headers in http.sent] == [None, "p1", "p1"]


async def test_who_asks_often_is_told_that_nobody_answers() -> None:
    """A short wait does not begin the time anew for which it is tried."""
    events, http = listening(*(Lines(UNSENT) for _ in range(99)), retry_for=3.0)
    with pytest.raises(Unavailable, match="did not answer"):
        for _ in range(99):
            assert await events.next(timeout=0.1) is None
    assert 3.0 <= http.monotonic() <= 3.5


async def test_an_attempt_to_listen_counts_from_its_beginning() -> None:
    """An attempt that nobody answers takes 45 s, and the time for which it is repeated began after it."""
    events, http = listening(*(Lines(UNSENT) for _ in range(9)), retry_for=10.0)

    class Silent(Lines):
        async def line(self, timeout: float) -> str | HttpAnswer | None:
            http.slept.append(45.0)
            return await super().line(timeout)

    http.streams.insert(0, Silent(LOST))
    with pytest.raises(Unavailable, match="did not answer"):
        await events.next()
    assert http.monotonic() == 45.0


async def test_who_may_not_hear_is_told_at_once() -> None:
    events, http = listening(Lines(refused(403, "AccessDenied")), Lines(refused(403, "AccessDenied")))
    for _ in range(2):
        with pytest.raises(AccessDenied):
            await events.next()
    assert http.slept == []


# Leases


async def test_a_lease_nests_in_its_task_and_not_in_itself() -> None:
    taken = HttpAnswer(201, {}, b'{"lease": "x", "token": 5, "ttl": 30.0}')
    requests, http = asking(taken)
    record = AsyncRemoteRecord(requests, Ref("user", "u"))
    outer = record.lock()
    async with outer:
        async with record.lock() as inner:
            assert (inner.token, inner.lost) == (5, False)
        with pytest.raises(Locked):
            await outer.acquire()

        async def another() -> None:
            http.answers.append(refused(423, "Locked"))
            async with record.lock(wait=0.0):
                pass

        with pytest.raises(LockTimeout):  # a task inside writes under it, and locks like anybody else
            await asyncio.create_task(another())
        http.answers.append(DONE)
    assert [method for method, _, _ in http.sent] == ["POST", "POST", "DELETE"]
    assert http.stopped == 1


async def test_a_nested_lease_renews_the_outer_one_for_as_long_as_that_was_taken() -> None:
    requests, http = asking(HttpAnswer(201, {}, b'{"lease": "x", "token": 5, "ttl": 30.0}'))
    record = AsyncRemoteRecord(requests, Ref("user", "u"))
    async with record.lock(ttl=30.0), record.lock(ttl=1.0) as inner:
        http.answers.append(DONE)
        assert await inner.renew()
        http.answers.append(DONE)
    assert (http.sent[1][0], http.bodies[1]) == ("PUT", b'{"ttl":30.0}')


def test_a_later_release_may_answer_more() -> None:
    row = {"id": "a", "user": None, "version": 1, "created": 1.0, "updated": 1.0, "deleted": False, "cursor": "c"}
    assert values.made(SessionInfo, {**row, "more": 1}) == SessionInfo(**row)


# The token


def shown(place: HttpPlace) -> str | None:
    return place.headers.get("Authorization")


def test_a_token_is_given_or_in_the_environment_or_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shown(address("https://a.example")) is None
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    assert shown(address("https://a.example")) == f"Bearer {SECRET}"
    monkeypatch.setenv(TOKEN, "from-the-environment")
    assert shown(address("https://a.example")) == "Bearer from-the-environment"
    assert shown(address("https://a.example", "given")) == "Bearer given"
    monkeypatch.delenv(TOKEN)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=TOKEN_FILE):
        address("https://a.example")


async def test_a_token_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    place = address("http://127.0.0.1:1", SECRET)
    texts = [repr(place), str(place)]
    store = AsyncRemoteStore(place.url, AsyncHttp(place), retry_for=0.0)
    texts.append(repr(store))
    with pytest.raises(Unavailable) as error:
        await store.session("c1").get("a")
    texts += [repr(error.value), repr(error.value.__cause__)]
    await store.close()
    with pytest.raises(Unavailable) as error:
        RemoteStore.open("http://127.0.0.1:1", token=SECRET, retry_for=0.0)
    for bad in (SECRET + "\n" + SECRET, f"{SECRET} {SECRET}", f"{SECRET}é", ""):
        with pytest.raises(ConfigurationError) as refusal:
            address("https://a.example", bad)
        texts.append(repr(refusal.value))
    assert SECRET not in " ".join([*texts, repr(error.value), caplog.text])


@pytest.mark.parametrize(
    "url",
    [
        "http://8.8.8.8", "http://[2001:4860:4860::8888]:80", "https://user:word@a.example", "https://", "http://a:b",
        "https://a.example?x=1", "https://a.example/#x", "http://[::1",
    ],
)  # fmt: skip
def test_a_url_that_a_token_must_not_go_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        address(url, SECRET)
    assert "word" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:80", "http://10.0.0.7", "http://state.svc:80/base/", "https://8.8.8.8"]
)
def test_private_networks_and_tls_are_fine(url: str) -> None:
    assert address(url, SECRET).url == url.rstrip("/")


def test_what_the_service_sets_is_refused_at_open() -> None:
    for given in ({"archive": "memory"}, {"namespace": "a"}, {"recent_messages": 5}, {"search": True}):
        with pytest.raises(ConfigurationError, match=next(iter(given))):
            StateStore.open("http://127.0.0.1:1", **given)
        with pytest.raises(ConfigurationError):
            AsyncStateStore.open("http://127.0.0.1:1", **given)
    with pytest.raises(ConfigurationError, match="token"):
        StateStore.open(archive="memory", token=SECRET)
    with pytest.raises(ConfigurationError, match="retry_for"):
        StateStore.open("http://127.0.0.1:1", retry_for=-1)


def test_without_httpx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'distributed-state\[remote\]'"):
        StateStore.open("http://127.0.0.1:1")
    with pytest.raises(ConfigurationError):
        BlockingHttp(address("http://127.0.0.1:1"))


# Names and values


def test_conditions_are_headers() -> None:
    assert values.conditions(7) == {"If-Match": '"7"'}
    assert values.conditions(None, True) == {"If-Match": "*"}
    assert values.conditions(None, False) == {"If-None-Match": "*"}
    for bad in ((-1, None), (True, None), (1, True)):
        with pytest.raises(InvalidValue):
            values.conditions(*bad)


# What is not there

SAME = (
    (AsyncStateStore, AsyncRemoteStore), (AsyncSession, AsyncRemoteSession), (AsyncRecord, AsyncRemoteRecord),
    (AsyncItems, AsyncRemoteItems),
)  # fmt: skip
OWN = {("apply", "durability"), *(("open", name) for name in ("token", "retry_for", "timeout"))}


@pytest.mark.parametrize(("direct", "remote"), SAME)
def test_an_option_of_the_direct_store_is_there_or_in_the_list(direct: type, remote: type) -> None:
    for name in {name for name in dir(direct) if name[0] != "_"} & {*dir(remote)} - {"open"}:
        if inspect.isfunction(method := getattr(direct, name)):
            options = {*inspect.signature(method).parameters} - {"options"}
            options |= {*SessionOptions.__annotations__} if "schema" in options else set()
            has = {*inspect.signature(getattr(remote, name)).parameters}
            assert options - has <= values.OPTIONS.keys(), name
            assert options - has == set() or "others" in has, name
            assert {(name, each) for each in has - options - {"others"}} <= OWN


async def test_an_option_that_is_not_there_says_what_to_use() -> None:
    http = Scripted()
    store = AsyncRemoteStore("http://a", http)
    session: Any = store.session("c")
    for call in (
        lambda: store.session("c", schema=dict), lambda: store.user("u", actor="a"), lambda: store.task("t", idle=1),
        lambda: store.events(group="g"), lambda: session.lock(advisory=True),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"= of .* is not available on a remote store: "):
            call()
    for work in (
        session.apply(dict, merge={}),
        session.items("x").put("a", 1, equals=2),
        store.admin.compact(progress=print),
    ):
        with pytest.raises(ConfigurationError):
            await work
    with pytest.raises(TypeError, match=r"lock.* got an unexpected keyword argument 'advisry'"):
        session.lock(advisry=True)
    with pytest.raises(ConfigurationError, match="equals= of put_item"):
        RemoteTransaction(State()).put_item("a", "b", 1, equals=2)
    with pytest.raises(ConfigurationError, match="equals= of an item"):
        await session.write(items=[PutItem(collection="a", key="b", value=1, equals=2)])
    assert http.sent == []


def test_an_adapter_says_that_it_takes_no_remote_store() -> None:
    store = RemoteStore(AsyncRemoteStore("http://a", Scripted()))
    for given in (store, AsyncRemoteStore("http://a", Scripted())):
        with pytest.raises(ConfigurationError, match="not through a service: open the store at its redis:// URL"):
            open_store(given)


def test_the_times_of_a_turn_are_those_that_its_worker_measured() -> None:
    found: dict[str, Any] = {
        "version": 2, "time": 1.5, "kind": "turn", "actor": "", "token": 7, "fields": {}, "deleted": [],
        "messages": [], "phase": None, "label": None, "items": [], "tagged": [], "untagged": [],
    }  # fmt: skip
    assert values.change(found, Ref("session", "s")).times is None, "a service of an earlier release has none"
    times = TurnTimes(total=4.0, lock=0.25, runs=(TimedRun("tool", "search", 3.0),), more=2, more_seconds=0.5)
    assert values.change(found | {"times": asdict(times)}, Ref("session", "s")).times == times
