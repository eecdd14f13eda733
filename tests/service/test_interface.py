"""What the service promises of each resource, asked over HTTP on real servers."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from below import until
from serving import JSON, served

from distributed_state import AsyncStateStore, RemoteStore, StateStore
from distributed_state.cold.store import ColdStore
from distributed_state.errors import AccessDenied, WarmUnavailable
from distributed_state.programs import logs
from distributed_state.programs.servers import redis_server
from distributed_state.programs.service import Limits, Service
from distributed_state.programs.service.authentication import Caller
from distributed_state.programs.service.limits import Budget, Quota, Rates
from distributed_state.programs.service.requests import READ, SENT, Asked
from distributed_state.programs.service.resources import conversations, records, search
from distributed_state.store.admin import AsyncAdmin

HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def place(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    folder = tmp_path_factory.mktemp("interface")
    return servers.redis("valkey").url, f"sqlite:///{folder}/a.db", f"t{os.urandom(6).hex()}"


@pytest.fixture(scope="module")
def http(place: tuple[str, str, str]) -> Iterator[httpx.Client]:
    with served(*place, search=True) as client:
        yield client


@pytest.fixture
def id(http: httpx.Client, namespace: str) -> str:
    """A conversation of the test's own, with n = 1."""
    assert http.post("/v1/conversations", json={"id": namespace, "user": "u", "fields": {"n": 1}}).status_code == 201
    return namespace


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]


def wait_for(condition: Callable[[], Any]) -> Any:
    return asyncio.run(until(condition, 20, every=0.02))


def test_an_export_that_cannot_go_on_is_no_whole_file(
    http: httpx.Client, id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = http.get(f"/v1/conversations/{id}/export")
    assert [json.loads(line).get("version") for line in whole.text.splitlines()] == [1, 1]
    monkeypatch.setattr(ColdStore, "history", lambda *_, **__: [])
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        http.get(f"/v1/conversations/{id}/export")
    assert [each.levelname for each in caplog.records if "cut off" in each.getMessage()] == ["WARNING"]


def test_what_is_logged_of_a_request_names_it(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service runs in a thread of this process, with its logs."""

    async def broken(_: AsyncStateStore) -> Any:
        raise WarmUnavailable("redis://secret: away")

    monkeypatch.setattr(AsyncAdmin, "replicas", broken)
    lines = logs.json_lines()
    stream = io.StringIO()
    lines.setStream(stream)
    log = logging.getLogger("distributed_state.programs.service.answers")
    log.addHandler(lines)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        assert http.get("/v1/replicas", headers={"X-Request-Id": "r-42"}).status_code == 503
    finally:
        log.removeHandler(lines)
        log.setLevel(before)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["level"], line["request_id"]) == ("INFO", "r-42")
    assert "redis://secret: away" in line["message"]


# Conditions


def test_the_etag_is_the_version_and_conditions_hold(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    first = http.get(path)
    assert first.headers["etag"] == '"1"'
    known = http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", '"1"')
    written = http.put(f"{path}/fields/n", json={"value": 2}, headers={"If-Match": '"1"'})
    assert (written.status_code, written.headers["etag"]) == (200, '"2"')
    refused = http.put(f"{path}/fields/n", json={"value": 3}, headers={"If-Match": '"1"'})
    assert said(refused) == (412, "Conflict")
    assert said(http.post(f"{path}/turns", json={"set": {"n": 3}}, headers={"If-Match": '"1"'})) == (412, "Conflict")
    assert http.get(path, headers={"If-None-Match": '"1"'}).json()["fields"] == {"n": 2}
    assert said(http.post(f"{path}/forks", json={}, headers={"If-Match": '"2"'})) == (422, "InvalidValue")
    assert said(http.post(f"{path}/turns", json={"set": {"n": 3}}, headers={"If-Match": "2"})) == (422, "InvalidValue")
    for wrong in [("If-Match", "")], [("If-None-Match", "")], [("If-Match", '"2"'), ("If-Match", "1")]:
        refused = http.put(f"{path}/fields/n", json={"value": 3}, headers=[*wrong, *JSON.items()])
        assert said(refused) == (422, "InvalidValue"), wrong
    there = http.post("/v1/conversations", json={"id": id}, headers={"If-None-Match": "*"})
    assert said(there) == (412, "Conflict")
    new = http.put(f"/v1/users/{id}/fields/a", json={"value": 1}, headers={"If-None-Match": "*"})
    again = http.put(f"/v1/users/{id}/fields/a", json={"value": 1}, headers={"If-None-Match": "*"})
    assert (new.status_code, again.status_code) == (200, 412)
    gone = http.put(f"/v1/tasks/{id}/fields/a", json={"value": 1}, headers={"If-Match": "*"})
    assert said(gone) == (412, "Conflict")


def test_a_read_of_a_field_with_a_deadline_is_never_answered_as_known(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/fields"
    assert http.put(f"{path}/offer", json={"value": 1, "ttl": 60}).json()["version"] == 2
    assert http.get(path, headers={"If-None-Match": '"2"'}).status_code == 200


def test_a_rollback_and_a_deletion_hold_for_the_version_that_was_seen(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    http.put(f"{path}/fields/n", json={"value": 2})
    for wrong in '"1"', '"3"':
        stale = {"If-Match": wrong}
        assert said(http.post(f"{path}/rollback", json={"steps": 1}, headers=stale)) == (412, "Conflict")
        assert said(http.request("DELETE", path, headers=stale)) == (412, "Conflict")
    back = http.post(f"{path}/rollback", json={"steps": 1}, headers={"If-Match": '"2"'})
    assert back.json() == {"version": 3, "repeated": False}
    assert http.get(path).json()["fields"] == {"n": 1}
    assert http.request("DELETE", path, headers={"If-Match": '"3"'}).json() == {"version": 4}
    assert said(http.request("DELETE", path, headers={"If-Match": "*"})) == (412, "Conflict")
    assert http.request("DELETE", path).json() == {"version": 4}, "and without a condition it is repeated at will"
    assert said(http.request("DELETE", f"{path}/everything", headers={"If-Match": "*"})) == (422, "InvalidValue")


def test_a_condition_that_does_not_hold_is_not_tried_again(
    http: httpx.Client, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stale = f"/v1/conversations/{id}", {"If-Match": '"9"'}
    tried = []
    begin = records.OnceOnly.look

    def look(once: records.OnceOnly, entry: Any) -> None:
        tried.append(entry.version)
        begin(once, entry)

    monkeypatch.setattr(records.OnceOnly, "look", look)
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/changes", {"key": "n", "add": 1}),
        ("PUT", "/messages", {"messages": [HI]}),
        ("DELETE", "/messages/last", None),
        ("POST", "/rollback", {"version": 1}),
    ]
    for method, rest, body in asked:
        assert said(http.request(method, path + rest, json=body, headers=stale)) == (412, "Conflict")
    assert tried == [1] * len(asked)


# Idempotency


def test_a_key_makes_a_write_once_and_remembers_its_body(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    asked: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("PATCH", "/fields", {"set": {"a": 1}, "increment": {"n": 2}}, {"increment": {"n": 3}}),
        ("PUT", "/fields/b", {"value": 1}, {"value": 2}),
        ("POST", "/messages", {"messages": [HI, HI]}, {"messages": [HI]}),
        ("POST", "/turns", {"messages": [HI]}, {"messages": [HI, HI]}),
        ("PATCH", "/tags", {"tag": {"run": ["r1"]}}, {"tag": {"run": ["r2"]}}),
        ("POST", "/checkpoints", {"label": "one"}, {"label": "two"}),
        ("PATCH", "/items/notes", {"put": {"k": 1}, "expect": "absent"}, {"put": {"k": 2}}),
        ("PUT", "/lifetime", {"idle": 3600}, {"idle": 7200}),
        ("POST", "/rollback", {"version": 7}, {"version": 6}),
    ]
    for number, (method, rest, body, other) in enumerate(asked):
        key = {"Idempotency-Key": f"k{number}"}
        first = http.request(method, path + rest, json=body, headers=key)
        again = http.request(method, path + rest, json=body, headers=key)
        assert first.status_code == again.status_code, first.text
        assert first.json()["version"] == number + 2
        assert again.json() == first.json() | {"repeated": True}
        assert again.headers["etag"] == first.headers["etag"]
        assert said(http.request(method, path + rest, json=other, headers=key)) == (422, "InvalidValue")
        reordered = json.dumps(dict(reversed(body.items())), indent=1)
        assert http.request(method, path + rest, content=reordered, headers=key).json()["repeated"]
    assert said(http.post(f"{path}/turns", json={"messages": [HI]}, headers={"Idempotency-Key": "k0"})) == (
        422, "InvalidValue",
    )  # fmt: skip
    found = http.get(path, params={"fresh": "true"}).json()
    assert (found["version"], found["fields"], len(found["messages"])) == (len(asked) + 1, {"n": 3, "a": 1, "b": 1}, 3)


def test_a_key_stays_used_when_what_it_did_is_rolled_back(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/turns", {"messages": [HI]}),
        ("PATCH", "/fields", {"increment": {"n": 2}}),
        ("POST", "/changes", {"key": "n", "add": 1}),
        ("DELETE", "/messages/last", None),
    ]
    first = [
        http.request(m, path + rest, json=body, headers={"Idempotency-Key": rest}).json() for m, rest, body in asked
    ]
    assert [each["version"] for each in first] == [2, 3, 4, 5]
    back = {"Idempotency-Key": "back"}
    assert http.post(f"{path}/rollback", json={"version": 1}, headers=back).json()["version"] == 6
    for (method, rest, body), known in zip(asked, first, strict=True):
        again = http.request(method, path + rest, json=body, headers={"Idempotency-Key": rest}).json()
        assert again["repeated"], rest
        assert again["version"] == known["version"]
    assert http.get(path, params={"fresh": "true"}).json()["fields"] == {"n": 1}
    assert http.post(f"{path}/rollback", json={"version": 2}).json()["version"] == 7
    assert http.post(f"{path}/rollback", json={"version": 1}, headers=back).json() == {"version": 6, "repeated": True}


def test_a_turn_is_repeated_with_the_outcome_that_its_client_gave(http: httpx.Client, id: str) -> None:
    """An outcome with a field `digest` was taken for another request's, and shown without it."""
    path, outcome = f"/v1/conversations/{id}/turns", {"digest": "d41d8cd98f00b204e9800998ecf8427e"}
    for repeated in False, True:
        found = http.post(path, json={"request_id": "r", "outcome": outcome})
        assert found.json() == {"version": 2, "repeated": repeated, "outcome": outcome}
    assert http.get(f"{path}/r").json() == {"version": 2, "repeated": True, "outcome": outcome}


def test_an_answered_turn_of_a_deleted_conversation_is_gone_with_it(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    assert http.post(f"{path}/turns", json={"request_id": "r", "outcome": 1}).status_code == 200
    assert http.delete(path).status_code == 200
    for request in "r", "never":
        assert said(http.get(f"{path}/turns/{request}")) == (410, "Deleted")


def test_an_owner_is_given_only_where_something_begins_that_can_have_one(http: httpx.Client, id: str) -> None:
    turn = {"set": {"a": 1}, "user": "other"}
    for path in f"/v1/conversations/{id}/turns", f"/v1/conversations/{id}-new/turns":
        for condition in {}, {"If-Match": '"1"'}:
            assert said(http.post(path, json=turn, headers=condition)) == (422, "InvalidValue")
    assert http.post(path, json=turn, headers={"If-None-Match": "*"}).status_code == 200
    found = http.get("/v1/conversations", params={"user": "other", "prefix": id, "fresh": "true"}).json()
    assert [each["id"] for each in found["conversations"]] == [f"{id}-new"]
    for path, body in ("/writes", {"set": {"a": 1}}), ("/changes", {"key": "a", "add": 1}):
        assert said(http.post(f"/v1/users/{id}{path}", json=body | {"user": "other"})) == (422, "InvalidValue")


# What HTTP itself asks


def test_a_method_that_is_not_served_is_answered_with_all_that_are(http: httpx.Client, id: str) -> None:
    found = http.put(f"/v1/conversations/{id}")
    assert said(found) == (405, "MethodNotAllowed")
    assert set(found.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("br;q=1, GZIP;q=0.1", True),
        ("*", True),
        ("x-gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("identity", False),
        ("*;q=0", False),
        ("", False),
    ],
)
def test_an_answer_is_compressed_for_who_accepts_it_and_has_an_etag_of_its_own(
    http: httpx.Client, id: str, accepted: str, compressed: bool
) -> None:
    path, field = f"/v1/conversations/{id}/fields", f"/v1/conversations/{id}/fields/large"
    tag = http.put(field, json={"value": "x" * 100_000}).headers["etag"]
    for each in path, "/v1/openapi.json":
        found = http.get(each, headers={"Accept-Encoding": accepted})
        assert (found.headers.get("content-encoding") == "gzip") is compressed
        assert found.headers["vary"] == "Accept-Encoding"
    found = http.get(path, headers={"Accept-Encoding": accepted})
    assert found.headers["etag"] == (f'{tag[:-1]}-gzip"' if compressed else tag)
    known = http.get(path, headers={"Accept-Encoding": accepted, "If-None-Match": found.headers["etag"]})
    assert (known.status_code, known.headers["etag"]) == (304, found.headers["etag"])
    assert http.put(field, json={"value": 1}, headers={"If-Match": found.headers["etag"]}).status_code == 200


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}])
def test_a_condition_may_list_etags(http: httpx.Client, id: str, key: dict[str, str]) -> None:
    path = f"/v1/conversations/{id}"
    for match, status in (
        ('"7", "1"', 200),
        ('"1", "3"', 412),  # it is at version 2
        ('W/"2"', 412),
        ('W/"2", "2"', 200),
        ('"03"', 412),
        ('"other"', 412),
        ('"3', 422),
        ("3", 422),
        ('"3" "4"', 422),
    ):
        headers = {"If-Match": match, **{name: value + match for name, value in key.items()}}
        found = http.put(f"{path}/fields/n", json={"value": 2}, headers=headers)
        assert found.status_code == status, (match, found.text)
    assert http.post(f"{path}/turns", json={"set": {"a": 1}}, headers={"If-Match": '"9", "4"'}).status_code == 412
    assert http.post(f"{path}/turns", json={"set": {"a": 1}}, headers={"If-Match": '"9", "3"'}).status_code == 200
    assert http.delete(path, headers={"If-Match": '"9", "3"'}).status_code == 412
    assert http.delete(path, headers={"If-Match": '"9", "4"'}).status_code == 200


def raw(http: httpx.Client, text: str) -> tuple[bytes, bytes]:
    """The head and the body of the answer to this."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = found.partition(b"\r\n\r\n")
    return head, body


def test_a_target_may_name_the_service_and_decides_by_which_name(http: httpx.Client, id: str) -> None:
    ours = http.base_url.host
    for target, host, status in (
        (f"http://{ours}:80/v1/conversations/{id}", "other", 200),
        (f"HTTPS://{ours}/v1/conversations/{id}?fresh=true", "other", 200),
        (f"http://other/v1/conversations/{id}", ours, 421),
        (f"http://{ours}", ours, 404),
    ):
        head, body = raw(http, f"GET {target} HTTP/1.1\nHost: {host}\nConnection: close\n\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), target
        assert (json.loads(body).get("id") == id) is (status == 200)


def test_what_is_not_http_is_answered_with_a_problem(http: httpx.Client) -> None:
    head, body = raw(http, "nonsense\n\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Type: application/problem+json" in head
    assert json.loads(body)["error"] == "BadRequest"


def test_an_operation_without_a_body_refuses_one(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    for method, rest in ("DELETE", ""), ("DELETE", "/fields/n"), ("GET", ""), ("GET", "/fields"), ("DELETE", "/lease"):
        refused = http.request(method, path + rest, json={"set": {"n": 2}})
        assert said(refused) == (422, "InvalidValue")
        assert refused.json()["detail"].endswith("takes no body")
    assert http.request("GET", path, content=b"", headers={"Content-Length": "0"}).json()["fields"] == {"n": 1}


def test_a_key_stays_used_when_its_record_is_deleted(http: httpx.Client, namespace: str) -> None:
    """A late repetition of its first request began the conversation again."""
    key, body = {"Idempotency-Key": "k"}, {"id": namespace, "fields": {"a": 1}}
    first = http.post("/v1/conversations", json=body, headers=key)
    assert http.delete(first.headers["location"]).status_code == 200
    again = http.post("/v1/conversations", json=body, headers=key)
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert said(http.get(first.headers["location"], params={"fresh": "true"})) == (410, "Deleted")
    assert http.post("/v1/conversations", json=body).status_code == 201, "a new request begins it again"


def test_a_key_makes_one_conversation_whose_id_is_not_given(http: httpx.Client, namespace: str) -> None:
    key = {"Idempotency-Key": namespace}
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"fields": {"a": 1}}] * 8
        made = list(pool.map(lambda body: http.post("/v1/conversations", json=body, headers=key), bodies))
    assert {each.status_code for each in made} == {201}
    assert len({each.json()["id"] for each in made}) == 1
    assert said(http.post("/v1/conversations", json={"fields": {"a": 2}}, headers=key)) == (422, "InvalidValue")
    assert http.delete(made[0].headers["location"]).status_code == 200
    late = http.post("/v1/conversations", json={"fields": {"a": 1}}, headers=key)
    assert said(late) == (410, "Deleted"), "a late repetition does not bring it back"


def test_a_key_makes_one_fork_whatever_becomes_of_its_source(http: httpx.Client, id: str) -> None:
    path, key = f"/v1/conversations/{id}/forks", {"Idempotency-Key": "k"}
    # What the source remembers under this key goes along, and is another request.
    assert http.put(f"/v1/conversations/{id}/fields/n", json={"value": 1}, headers=key).status_code == 200
    for body in {}, {"id": f"{id}-fork", "version": 1}:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda body: http.post(path, json=body, headers=key), [body] * 8))
        assert {each.status_code for each in made} == {201}, [each.text for each in made]
        assert len({each.json()["id"] for each in made}) == 1
        http.put(f"/v1/conversations/{id}/fields/n", json={"value": 2})
        assert http.get(made[0].headers["location"]).json()["fields"] == {"n": 1}
        assert http.post(path, json=body, headers=key).json() == made[0].json()
        http.put(f"/v1/conversations/{id}/fields/n", json={"value": 1})
    assert said(http.post(path, json={"id": f"{id}-fork"}, headers=key)) == (422, "InvalidValue")
    assert said(http.post(path, json={"id": f"{id}-fork"})) == (409, "Conflict")


def test_a_fork_answers_the_requests_that_its_source_has_answered(http: httpx.Client, id: str) -> None:
    """As the library does: a client that sends its last request again, to the fork, gets its answer."""
    source, made = f"/v1/conversations/{id}", f"/v1/conversations/{id}-fork"
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", "/fields", {"increment": {"n": 1}}),
        ("PUT", "/fields/m", {"value": 1}),
        ("POST", "/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("POST", "/turns", {"set": {"t": 1}}),
        ("POST", "/changes", {"key": "k", "add": 2}),
    ]

    def all_of(path: str) -> list[dict[str, Any]]:
        answers = [
            http.request(method, path + to, json=body, headers={"Idempotency-Key": f"k{number}"})
            for number, (method, to, body) in enumerate(requests)
        ]
        assert {each.status_code for each in answers} <= {200, 201}, [each.text for each in answers]
        return [each.json() for each in answers]

    assert [each["repeated"] for each in all_of(source)] == [False] * len(requests)
    assert http.post(f"{source}/forks", json={"id": f"{id}-fork"}).status_code == 201
    assert [each["repeated"] for each in all_of(made)] == [True] * len(requests)
    assert http.get(made).json()["version"] == 1
    other = http.put(f"{made}/fields/m", json={"value": 2}, headers={"Idempotency-Key": "k1"})
    assert said(other) == (422, "InvalidValue")
    elsewhere = http.put(f"{made}/fields/o", json={"value": 1}, headers={"Idempotency-Key": "k1"})
    assert said(elsewhere) == (422, "InvalidValue")


def test_a_key_that_made_a_fork_of_one_source_makes_none_of_another(http: httpx.Client, id: str) -> None:
    key = {"Idempotency-Key": id}
    first = http.post(f"/v1/conversations/{id}/forks", json={}, headers=key).json()["id"]
    assert said(http.post(f"/v1/conversations/{first}/forks", json={}, headers=key)) == (422, "InvalidValue")


def test_of_many_at_once_under_one_key_one_is_made(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/fields"

    def add(number: int) -> httpx.Response:
        return http.patch(path, json={"increment": {"n": 1}}, headers={"Idempotency-Key": f"r{number % 4}"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(add, range(24)))
    assert {each.status_code for each in answers} == {200}, [each.text for each in answers]
    assert http.get(path, params={"fresh": "true"}).json() == {"version": 5, "fields": {"n": 5}}
    assert sorted(each.json()["repeated"] for each in answers) == [False] * 4 + [True] * 20
    assert sorted({each.json()["results"]["n"] for each in answers}) == [2, 3, 4, 5], "each the sum of its own"


def test_without_its_memory_a_repeated_write_would_be_made_twice(
    http: httpx.Client, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the tests before."""
    monkeypatch.setattr(records.request_log, "add", lambda *parts: None)
    for version in 2, 3:
        key = {"Idempotency-Key": "r"}
        found = http.patch(f"/v1/conversations/{id}/fields", json={"increment": {"n": 1}}, headers=key).json()
        assert (found["version"], found["repeated"]) == (version, False)


# Leases


def test_who_holds_the_lease_writes_alone_at_any_worker(
    place: tuple[str, str, str], http: httpx.Client, id: str
) -> None:
    path = f"/v1/conversations/{id}"
    taken = http.post(f"{path}/lease", json={"ttl": 30})
    assert taken.status_code == 201
    lease = {"Lease": taken.json()["lease"]}
    with served(*place) as other:
        for worker in http, other:
            assert said(worker.put(f"{path}/fields/a", json={"value": 1})) == (423, "Locked")
            busy = worker.post(f"{path}/turns", json={"set": {"a": 1}})
            assert said(busy) == (423, "LockTimeout")
            assert "held by" not in busy.json()["detail"]
            assert worker.put(f"{path}/fields/a", json={"value": 1}, headers=lease).status_code == 200
            assert worker.post(f"{path}/turns", json={"messages": [HI]}, headers=lease).status_code == 200
            assert worker.put(f"{path}/lease", json={"ttl": 30}, headers=lease).status_code == 200
        assert said(other.post(f"{path}/lease", json={"wait": 0})) == (423, "LockTimeout")
        assert other.request("DELETE", f"{path}/lease", headers=lease).json() == {"released": True}
    assert said(http.put(f"{path}/fields/a", json={"value": 2}, headers=lease)) == (412, "Fenced")
    assert said(http.post(f"{path}/turns", json={"set": {"a": 2}}, headers=lease)) == (412, "Fenced")
    assert said(http.put(f"{path}/lease", json={}, headers=lease)) == (412, "Fenced")
    assert http.put(f"{path}/fields/a", json={"value": 3}).json()["version"] == 6
    tokens = {each["token"] for each in http.get(f"{path}/versions", params={"after": 1}).json()["versions"][:4]}
    assert tokens == {taken.json()["token"]}, "the fencing token stands in the history"


def test_a_lease_ends_with_its_time_and_is_of_one_record(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    lease = {"Lease": http.post(f"{path}/lease", json={"ttl": 1}).json()["lease"]}
    assert said(http.put(f"/v1/users/{id}/fields/a", json={"value": 1}, headers=lease)) == (412, "Fenced")
    wait_for(lambda: http.put(f"{path}/fields/a", json={"value": 1}).status_code == 200)
    assert said(http.put(f"{path}/fields/a", json={"value": 2}, headers=lease)) == (412, "Fenced")
    for wrong in "", "x", "eDE", "w7w":
        assert said(http.put(f"{path}/fields/a", json={"value": 2}, headers={"Lease": wrong})) == (422, "InvalidValue")


# Resources


def test_items_are_changed_in_one_commit_and_read_page_by_page(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/items/notes"
    assert http.patch(path, json={"put": {"a/b": [1], "ä?": None}, "bytes": {"photo": "/w=="}}).json()["version"] == 2
    assert said(http.patch(path, json={"put": {"a/b": 2, "new": 1}, "expect": "absent"})) == (409, "Conflict")
    assert said(http.patch(path, json={"delete": ["new"], "expect": "present"})) == (409, "Conflict")
    seen: list[tuple[str, Any]] = []
    page = http.get(path, params={"limit": 1, "order": "desc"})
    while True:
        seen += [(each["key"], each.get("bytes", each.get("value"))) for each in page.json()["items"]]
        if "next" not in page.links:
            break
        page = http.get(page.links["next"]["url"])
    assert seen == [("ä?", None), ("photo", "/w=="), ("a/b", [1])]
    assert http.get(f"{path}/a%2Fb").json() == {"key": "a/b", "version": 2, "origin": "", "value": [1]}
    stale = {"If-Match": '"1"'}
    assert said(http.patch(path, json={"delete": ["a/b"]}, headers=stale)) == (412, "Conflict")
    assert http.patch(path, json={"delete": ["a/b"]}).json() == {"version": 3, "repeated": False}
    assert said(http.get(f"{path}/a%2Fb")) == (404, "NotFound")
    assert http.get(f"{path}/a%2Fb", params={"version": 2}).json()["value"] == [1]
    assert said(http.get("/v1/conversations/nobody/items/notes")) == (404, "NotFound")
    assert said(http.patch("/v1/conversations/nobody/items/notes", json={"put": {"a": 1}})) == (404, "NotFound")
    assert http.patch(path, content='{"put": {"\\udc80": 1}}').json()["version"] == 4
    assert http.get(f"{path}/%ED%B2%80").json()["value"] == 1


def test_checkpoints_are_read_page_by_page(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/checkpoints"
    for label in "first", "next", "last":
        http.post(path, json={"label": label})
    for order, expected in ("asc", ["first", "next", "last"]), ("desc", ["last", "next", "first"]):
        page = http.get(path, params={"limit": 2, "order": order})
        rest = http.get(page.links["next"]["url"])
        assert [each["label"] for one in (page, rest) for each in one.json()["checkpoints"]] == expected
        assert rest.links == {}


def test_one_write_takes_items_and_a_lifetime_with_it(http: httpx.Client, id: str) -> None:
    path, note = f"/v1/conversations/{id}", {"collection": "notes", "key": "a"}
    both = {
        "set": {"n": 1},
        "items": [note | {"value": None}, note | {"key": "b", "bytes": "/w=="}],
        "lives": {"idle": 60},
    }
    assert http.post(f"{path}/writes", json=both).json()["version"] == 2
    assert [each["key"] for each in http.get(f"{path}/items/notes").json()["items"]] == ["a", "b"]
    assert http.get(f"{path}/lifetime").json()["idle"] == 60
    taken = {"items": [note | {"value": 1, "keep": True}, note | {"key": "b", "delete": True, "expect": "present"}]}
    assert http.post(f"{path}/writes", json=taken).json()["version"] == 3
    assert [each["value"] for each in http.get(f"{path}/items/notes").json()["items"]] == [None], "kept, and deleted"
    for wrong in (
        note, note | {"value": 1, "delete": True}, note | {"value": 1, "bytes": "/w=="}, note | {"bytes": "?"},
        note | {"delete": True, "expect": "absent"}, note | {"value": 1, "collection": "a\0b"},
    ):  # fmt: skip
        assert said(http.post(f"{path}/writes", json={"items": [wrong]})) == (422, "InvalidValue")
    assert said(http.post(f"{path}/writes", json={"items": [note | {"value": 1, "expect": "absent"}]})) == (
        409,
        "Conflict",
    )
    assert said(http.post(f"/v1/users/{id}/writes", json={"lives": {"idle": 60}})) == (422, "InvalidValue")


def test_a_repetition_is_answered_as_the_first_was(http: httpx.Client, id: str) -> None:
    """Every operation that takes a key, with and without messages; `repeated` alone differs."""
    one, item = f"/v1/conversations/{id}", {"collection": "notes", "key": "a", "value": 1}
    writes: list[tuple[str, str, Any]] = [
        ("POST", "/writes", {"set": {"a": 1}}), ("POST", "/writes", {"append": [HI], "increment": {"n": 2}}),
        ("POST", "/writes", {"items": [item]}), ("POST", "/writes", {"clear": ["messages"]}),
        ("POST", "/messages", {"messages": [HI, HI]}), ("POST", "/turns", {"set": {"a": 2}}),
        ("POST", "/turns", {"messages": [HI]}), ("POST", "/changes", {"key": "n", "add": 1}),
        ("POST", "/changes", {"key": "l", "extend": [1]}), ("PATCH", "/fields", {"increment": {"n": 1}}),
        ("PUT", "/fields/b", {"value": 1}), ("DELETE", "/fields/b", None), ("PATCH", "/tags", {"tag": {"k": ["v"]}}),
        ("PATCH", "/items/notes", {"put": {"b": 1}}), ("PUT", "/lifetime", {"idle": 60}),
        ("POST", "/checkpoints", {"label": "x"}), ("PUT", "/messages", {"messages": [HI]}),
        ("DELETE", "/messages/last", None), ("POST", "/rollback", {"steps": 1}), ("POST", "/forks", {"id": f"{id}-f"}),
    ]  # fmt: skip
    for number, (method, path, body) in enumerate(writes):
        content = None if body is None else json.dumps(body)
        first, second = (
            http.request(method, one + path, content=content, headers=JSON | {"Idempotency-Key": f"k{number}"})
            for _ in range(2)
        )
        assert first.status_code == second.status_code < 300, (path, first.text, second.text)
        assert second.json() == first.json() | ({"repeated": True} if "repeated" in first.json() else {}), path
        if "first_message" in first.json():
            added = bool(body.get("append") or body.get("messages"))
            assert (first.json()["first_message"] is not None) is added, path
            if added:
                assert http.get(f"{one}/messages/{first.json()['first_message']}").json()["content"] == "hi"


def test_a_conversation_ends_by_itself_if_it_is_told_to(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    assert http.get(f"{path}/lifetime").json() == {"idle": None, "until": None, "ends": None}
    assert http.put(f"{path}/lifetime", json={"idle": 60, "lifetime": 3600}).json() == {"version": 2, "repeated": False}
    lives = http.get(f"{path}/lifetime").json()
    assert (lives["idle"], 3500 < lives["until"] - lives["ends"] < 3545) == (60, True)
    assert http.put(f"{path}/lifetime", json={"idle": 0.05}).status_code == 200
    wait_for(lambda: http.get(path, params={"fresh": "true"}).status_code == 410)
    assert said(http.get(f"{path}/lifetime")) == (410, "Deleted")
    assert said(http.put("/v1/conversations/nobody/lifetime", json={"idle": 1})) == (404, "NotFound")


def test_what_was_is_bounded_as_what_is(place: tuple[str, str, str], http: httpx.Client, id: str) -> None:
    """A page of versions, a version and a comparison of two, of a record that is larger than an answer may be."""
    path = f"/v1/conversations/{id}"
    for _ in range(4):
        http.post(f"{path}/messages", json={"messages": [HI | {"content": "x" * 10_000}]})
    with served(*place, service=Service(Limits(answer=32_000))) as bounded:
        http.put(f"/v1/users/{id}/fields/large", json={"value": "x" * 33_000})
        for rest in "", "/fields", "/fields/large":
            assert said(bounded.get(f"/v1/users/{id}{rest}")) == (422, "InvalidValue"), rest
        for rest in "/versions", "/versions/5", "/versions/1/diff?to=5":
            assert said(bounded.get(path + rest)) == (422, "InvalidValue"), rest
            assert http.get(path + rest).status_code == 200
        assert len(bounded.get(f"{path}/versions", params={"limit": 3}).json()["versions"]) == 3
        assert len(bounded.get(f"{path}/versions/3").json()["messages"]) == 2
        with RemoteStore.open(str(bounded.base_url)) as remote:
            assert [each.version for each in remote.session(id).history()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["a?b", "ä b", "日本#1", "a%2Fb", "<>"])
def test_links_lead_on_whatever_an_id_looks_like(http: httpx.Client, namespace: str, name: str) -> None:
    made = http.post("/v1/conversations", json={"id": namespace + name, "fields": {"a": 1}})
    path = made.headers["location"]
    http.post(f"{path}/messages", json={"messages": [HI, HI]})
    page = http.get(f"{path}/messages", params={"limit": 1})
    assert page.status_code == 200, page.text
    assert [each["number"] for each in http.get(page.links["next"]["url"]).json()["messages"]] == [1]
    fork = http.post(f"{path}/forks", json={"id": f"{namespace}fork{name}"})
    assert http.get(fork.headers["location"]).json()["id"] == f"{namespace}fork{name}"


def test_messages_are_paged_by_number_both_ways(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/messages"
    added = http.post(path, json={"messages": [HI | {"content": str(n)} for n in range(5)]})
    assert (added.status_code, added.json()["first_message"]) == (201, 0)
    for order, wanted in ("asc", ["0", "1", "2", "3", "4"]), ("desc", ["4", "3", "2", "1", "0"]):
        seen: list[str] = []
        page = http.get(path, params={"limit": 2, "order": order})
        while True:
            seen += [each["content"] for each in page.json()["messages"]]
            if "next" not in page.links:
                break
            page = http.get(page.links["next"]["url"])
        assert seen == wanted
    one = http.get(f"{path}/3").json()
    assert (one["content"], one["number"]) == ("3", 3)
    assert said(http.get(f"{path}/9")) == (404, "NotFound")


def test_values_come_back_as_they_were_sent(http: httpx.Client, id: str) -> None:
    values = {"large": 12345678901234567890123, "odd": "\udc80\x00", "deep": [[1.0, 1, True, None]], "\udc80": 1}
    path = f"/v1/conversations/{id}/fields"
    patched = http.patch(path, content=json.dumps({"set": values, "bytes": {"photo": "/w=="}, "delete": ["n"]}))
    assert patched.status_code == 200, patched.text
    found = http.get(path, params={"fresh": "true"}).json()
    assert (found["fields"], found["bytes"]) == (values, {"photo": "/w=="})
    assert repr(found["fields"]["deep"]) == "[[1.0, 1, True, None]]"
    assert http.get(f"{path}/large").json()["value"] == values["large"]
    assert http.get(f"{path}/photo").json() == {"version": 2, "bytes": "/w=="}
    assert said(http.get(f"{path}/n")) == (404, "NotFound")
    at = http.get(f"/v1/conversations/{id}/versions/2").json()
    assert (at["fields"], at["bytes"]) == (values, {"photo": "/w=="})


def test_several_fields_are_changed_under_what_they_must_hold(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/fields"
    assert http.patch(path, json={"set": {"a": 1}, "expect": {"n": 1.0}, "expect_absent": ["a"]}).status_code == 200
    for held in {"expect": {"n": 2}}, {"expect_absent": ["a"]}, {"expect_present": ["b"]}:
        assert said(http.patch(path, json={"set": {"a": 2}} | held)) == (409, "Conflict")
        key = {"Idempotency-Key": "k"}
        assert said(http.patch(path, json={"set": {"a": 2}} | held, headers=key)) == (409, "Conflict")
    http.put(f"{path}/text", json={"value": "x"})
    for headers in {}, {"Idempotency-Key": "k2"}:
        assert said(http.patch(path, json={"increment": {"text": 1}}, headers=headers)) == (409, "Conflict")
    found = http.get(path, params={"fresh": "true"}).json()
    assert found == {"version": 3, "fields": {"n": 1, "a": 1, "text": "x"}}


def test_the_past_is_read_compared_restored_and_forked(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    http.post(f"{path}/checkpoints", json={"label": "before"})
    http.post(f"{path}/turns", json={"messages": [HI], "set": {"n": 2, "m": 1}, "event": "new_task"})
    http.patch(f"{path}/tags", json={"tag": {"run": ["r1", "r2"]}})
    page = http.get(f"{path}/versions", params={"limit": 3})
    assert [each["kind"] for each in page.json()["versions"]] == ["create", "checkpoint", "turn"]
    (last,) = http.get(page.links["next"]["url"]).json()["versions"]
    assert (last["version"], last["tagged"]) == (4, [["run", "r1"], ["run", "r2"]])
    assert http.get(f"{path}/checkpoints").json()["checkpoints"][0]["label"] == "before"
    found = http.get(f"{path}/versions/1/diff", params={"to": 4}).json()
    assert (found["fields"], found["deleted"], found["moved"]) == ({"n": 2, "m": 1}, [], True)
    assert ([each["content"] for each in found["messages"]], found["tagged"]) == (["hi"], last["tagged"])
    back = http.get(f"{path}/versions/4/diff", params={"to": 1}).json()
    assert (back["fields"], back["deleted"], back["removed_messages"]) == ({"n": 1}, ["m"], [0])
    assert http.post(f"{path}/rollback", json={"label": "before"}).json() == {"version": 5, "repeated": False}
    assert http.get(path).json()["fields"] == {"n": 1}
    fork = http.post(f"{path}/forks", json={"version": 4})
    assert fork.status_code == 201, fork.text
    assert http.get(fork.headers["location"]).json()["fields"] == {"n": 2, "m": 1}
    assert said(http.get(f"{path}/versions/99")) == (404, "NotFound")
    assert http.get(f"{path}/branches").json() == {"branches": []}


def test_listings_are_narrowed_and_paged(http: httpx.Client, namespace: str) -> None:
    ids = [f"{namespace}-{n}" for n in range(5)]
    for each in ids:
        http.post("/v1/conversations", json={"id": each, "user": namespace})
        http.post("/v1/tasks", json={"id": each, "user": namespace})
    http.patch(f"/v1/conversations/{ids[3]}/tags", json={"tag": {"run": ["a:b"]}})

    def listed(**asked: Any) -> list[str]:
        page, seen = http.get("/v1/conversations", params={"fresh": "true", "limit": 2} | asked), []
        while True:
            seen += [each["id"] for each in page.json()["conversations"]]
            if "next" not in page.links:
                return seen
            page = http.get(page.links["next"]["url"])

    assert listed(prefix=f"{namespace}-") == ids
    assert listed(prefix=namespace, tag="run:a:b") == [ids[3]]
    tasks = http.get("/v1/tasks", params={"user": namespace, "fresh": "true"}).json()["tasks"]
    assert {each["id"] for each in tasks} == {*ids}
    hits = http.post("/v1/search", json={"prefix": f"{namespace}-", "fresh": True, "limit": 50}).json()["hits"]
    assert hits == []


def test_a_user_is_forgotten_and_a_conversation_erased(http: httpx.Client, id: str, namespace: str) -> None:
    user = f"forgotten-{namespace}"
    http.put(f"/v1/users/{user}/fields/name", json={"value": "Ada"})
    http.post("/v1/conversations", json={"id": f"{id}-2", "user": user})
    assert http.get(f"/v1/users/{user}").json()["fields"] == {"name": "Ada"}
    assert http.delete(f"/v1/users/{user}/traces").json() == {"records": 2}
    assert http.get(f"/v1/users/{user}").status_code in (404, 410)
    assert http.delete(f"/v1/conversations/{id}/everything").json() == {"erased": True}
    assert http.get(f"/v1/conversations/{id}/versions").status_code in (404, 410)


# Bodies, pages and errors


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_body_of_another_type_is_refused(http: httpx.Client, kind: str | None, body: bytes) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    assert said(httpx.post(f"{http.base_url}/v1/conversations", content=body, headers=headers)) == (
        415, "UnsupportedMediaType",
    )  # fmt: skip


def test_a_body_that_is_compressed_is_refused(http: httpx.Client) -> None:
    given = {"content": gzip.compress(b"{}"), "headers": {"Content-Encoding": "gzip"}}
    assert said(http.post("/v1/conversations", **given)) == (415, "UnsupportedMediaType")
    given = {"content": b"{}", "headers": {"Content-Encoding": "identity"}}
    assert http.post("/v1/conversations", **given).status_code == 201


@pytest.mark.parametrize("name", ["id", "user"])
def test_what_is_no_id_is_refused_when_it_is_made(http: httpx.Client, name: str) -> None:
    for wrong, refused in ("", (422, "InvalidValue")), (7, (422, "InvalidValue")), ("\0" * 1000, (413, "TooLarge")):
        for kind in "conversations", "tasks":
            assert said(http.post(f"/v1/{kind}", json={name: wrong})) == refused
        if name == "user":
            assert said(http.post("/v1/conversations/c/writes", json={"user": wrong, "set": {"a": 1}})) == refused


@pytest.mark.parametrize("id", ["%FF", "%ED%A0%BD%ED%B8%80"])
def test_a_path_that_has_no_one_meaning_is_refused(http: httpx.Client, id: str) -> None:
    for method, rest in ("PUT", "/fields/a"), ("POST", "/writes"), ("GET", "/fields"):
        assert said(http.request(method, f"/v1/users/{id}{rest}", content=b"{}")) == (422, "InvalidValue")
    assert http.put("/v1/users/%EF%BF%BD/fields/a", json={"value": 1}).status_code == 200, "U+FFFD as it is, is one"


def test_what_takes_no_query_does_not_ignore_one(http: httpx.Client, id: str) -> None:
    for method, rest in ("DELETE", "/everything?dry_run=true"), ("GET", "/branches?limit=1"), ("DELETE", "?version=1"):
        assert said(http.request(method, f"/v1/conversations/{id}{rest}")) == (422, "InvalidValue")
    assert http.get(f"/v1/conversations/{id}").status_code == 200


def test_a_sum_that_is_no_number_is_refused(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}/changes"
    assert http.post(path, json={"key": "n", "add": 0.5}).json()["sum"] == 1.5
    for by in 10**400, float("inf"), float("nan"):
        assert said(http.post(path, content=json.dumps({"key": "n", "add": by}))) == (422, "InvalidValue")


def test_true_is_no_number_of_seconds(http: httpx.Client, id: str) -> None:
    path = f"/v1/conversations/{id}"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("PUT", f"{path}/fields/a", {"value": 1, "ttl": True}),
        ("PUT", f"{path}/lifetime", {"idle": True}),
        ("POST", f"{path}/lease", {"ttl": "30"}),
        ("POST", "/v1/maintenance/purge", {"older_than": True}),
        ("POST", "/v1/maintenance/purge", {"older_than": 10**400}),
    ]
    for method, place, body in asked:
        assert said(http.request(method, place, json=body)) == (422, "InvalidValue"), body
    assert http.put(f"{path}/fields/a", json={"value": 1, "ttl": 60}).status_code == 200


def test_more_tags_than_sql_can_look_for_are_refused(http: httpx.Client) -> None:
    for many, status in (32, 200), (1_000, 422):
        tags = [f"a:{number}" for number in range(many)]
        assert http.get("/v1/conversations", params={"tag": tags, "fresh": "true"}).status_code == status


def test_an_unknown_name_is_named(http: httpx.Client, id: str) -> None:
    refused = http.patch(f"/v1/conversations/{id}/fields", json={"sets": {"a": 1}})
    assert said(refused) == (422, "InvalidValue")
    assert "'sets'" in refused.json()["detail"]
    assert "increment" in refused.json()["detail"]
    assert said(http.get("/v1/conversations", params={"limits": 1})) == (422, "InvalidValue")


def test_a_request_with_a_name_of_a_newer_release_changes_nothing(http: httpx.Client, id: str) -> None:
    """A part of it that is not understood may be the one that matters."""
    place, more = f"/v1/conversations/{id}", {"of_the_next": 1}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{place}/turns", {"messages": [HI]}),
        ("POST", f"{place}/messages", {"messages": [HI]}),
        ("PATCH", f"{place}/fields", {"set": {"n": 2}}),
        ("PUT", f"{place}/fields/n", {"value": 2}),
        ("POST", f"{place}/forks", {"id": f"{id}-2"}),
        ("POST", "/v1/conversations", {"id": f"{id}-2"}),
    ]
    for method, path, body in asked:
        assert said(http.request(method, path, json=body | more)) == (422, "InvalidValue"), path
        assert said(http.request(method, path, json=body, params=more)) == (422, "InvalidValue"), path
    assert said(http.delete(place, params=more)) == (422, "InvalidValue")
    found = http.get(place).json()
    assert (found["version"], found["fields"]) == (1, {"n": 1})
    assert http.get(f"/v1/conversations/{id}-2").status_code == 404
    for method, path, body in asked[:4]:
        assert http.request(method, path, json=body).is_success, path  # without it each is understood


def test_every_error_is_a_problem_with_the_id_of_its_request(http: httpx.Client) -> None:
    for path in "/v1/conversations/nobody", "/v1/nowhere", "/v1/conversations?limit=0":
        answer = http.get(path, headers={"X-Request-Id": "7f"})
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem.keys() == {"type", "title", "status", "detail", "instance", "error"}
        assert (problem["status"], problem["instance"]) == (answer.status_code, "7f")
        assert answer.headers["x-request-id"] == "7f"
    made = http.get("/v1/nowhere")
    assert made.json()["instance"] == made.headers["x-request-id"] != ""


def test_what_is_large_is_compressed_if_its_client_can_read_it(http: httpx.Client, id: str) -> None:
    http.put(f"/v1/conversations/{id}/fields/text", json={"value": "x" * 100_000})
    path = f"/v1/conversations/{id}/fields/text"
    with http.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as small:
        data = b"".join(small.iter_raw())
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    assert small.headers["content-encoding"] == "gzip"
    assert len(data) < 2_000
    assert gzip.decompress(data) == plain.content
    assert "content-encoding" not in plain.headers
    assert "content-encoding" not in http.get(f"/v1/conversations/{id}/fields/n").headers


def test_pages_of_others_may_call_it_only_if_they_are_named(place: tuple[str, str, str], http: httpx.Client) -> None:
    asks = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "PATCH"}
    assert "access-control-allow-origin" not in http.options("/v1/conversations", headers=asks).headers
    service = Service(Limits(), origins=("https://app.example.com",))
    with served(*place, service=service) as open_to_one:
        allowed = open_to_one.options("/v1/conversations", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "access-control-allow-credentials" not in allowed.headers
        scripts = asks | {"Access-Control-Request-Headers": ", ".join(READ)}
        assert open_to_one.options("/v1/mcp", headers=scripts).status_code == 200
        actor = asks | {"Access-Control-Request-Headers": "X-Actor"}
        assert open_to_one.options("/v1/conversations", headers=actor).status_code == 400
        answer = open_to_one.get("/v1/conversations", headers={"Origin": "https://app.example.com"})
        assert {*answer.headers["access-control-expose-headers"].split(", ")} == {*SENT}
        other = open_to_one.options("/v1/conversations", headers=asks | {"Origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers


# What errors say


SECRETS = (
    "sesame",
    "wicked",
    "127.0.0.1",
    "localhost",
    "redis",
    "valkey",
    "sqlite",
    "postgres",
    "a.db",
    ".lua",
    "NOPERM",
)


def leaks(text: str) -> list[str]:
    return [each for each in SECRETS if each.lower() in text.lower()]


def test_what_is_away_or_denied_is_named_to_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is gone, a user without the right, a database that is unreadable."""
    caplog.set_level("INFO")
    with redis_server() as server:
        import redis

        admin = redis.Redis.from_url(server.url)
        admin.execute_command("ACL", "SETUSER", "wicked", "on", ">sesame", "~*", "&*", "+@all")
        url = f"redis://wicked:sesame@{server.url.rpartition('@')[2].removeprefix('redis://')}"
        with served(url, f"sqlite:///{tmp_path}/a.db", "n", retry_for=1.0, archiver=False) as http:
            http.post("/v1/conversations", json={"id": "c"})
            asked = [
                lambda: http.post("/v1/conversations/c/turns", json={"messages": [HI]}),
                lambda: http.get("/v1/conversations/c", params={"fresh": "true"}),
                lambda: http.post("/v1/conversations", json={}),
                lambda: http.post("/v1/conversations/c/lease", json={}),
                lambda: http.get("/v1/conversations/c/versions"),
                lambda: http.get("/v1/conversations"),
                lambda: http.get("/v1/events"),
            ]
            admin.execute_command("ACL", "SETUSER", "wicked", "-@all", "+ping", "+hello", "+auth")
            denied = [each() for each in asked[:5]]
            assert {each.status_code for each in denied} <= {500, 503}, [each.text for each in denied]
            admin.execute_command("ACL", "SETUSER", "wicked", "+@all")
            for file in tmp_path.glob("a.db*"):
                file.write_bytes(b"no database" * 1000)
            unread = http.get("/v1/conversations")
            server.kill()
            away = [each() for each in asked[:5]]
            assert {each.status_code for each in away} <= {500, 503}
        for answer in [*denied, unread, *away]:
            assert leaks(answer.text) == [], answer.text
        assert leaks(caplog.text), "the log says it"
        admin.close()


def test_a_text_of_an_inner_error_would_be_noticed() -> None:
    """The negative control of the test before."""
    assert leaks("Redis at 127.0.0.1:6379 as wicked: Connection refused") == ["wicked", "127.0.0.1", "redis"]


# Tenants


async def test_what_a_tenant_makes_and_lists_is_its_own() -> None:
    async with AsyncStateStore.open(archive="memory") as store:

        def asked(method: str, path: str, **params: str) -> Asked:
            from starlette.requests import Request

            scope = {
                "type": "http", "method": method, "path": path, "query_string": b"", "path_params": params,
                "headers": [], "server": ("x", 80), "scheme": "http",
            }  # fmt: skip
            return Asked(
                store, Limits(), Caller("ada", "acme:"), Request(scope), Quota(Limits()), Rates(Limits()), Budget(2**20)
            )

        await store.session("other:c").set("a", 1)
        made = await conversations.create("session", asked("POST", "/v1/conversations"), conversations.Create())
        assert json.loads(bytes(made.body))["id"].startswith("acme:")
        for body in {"id": "other:d"}, {"user": "other:u"}, {"id": "c"}:
            with pytest.raises(AccessDenied):
                await conversations.create("session", asked("POST", "/v1/conversations"), conversations.Create(**body))
        with pytest.raises(AccessDenied):
            await records.delete("session", asked("DELETE", "/v1/conversations/other:c", id="other:c"))
        found = await search.listing("session", asked("GET", "/v1/conversations"), search.Listing(fresh=True))
        assert [each["id"][:5] for each in json.loads(bytes(found.body))["conversations"]] == ["acme:"]
        for wrong in search.Listing(prefix="other:"), search.Listing(user="other:u"):
            with pytest.raises(AccessDenied):
                await search.listing("session", asked("GET", "/v1/conversations"), wrong)


def test_who_holds_the_lease_is_told_once_that_somebody_asked_to_stop(
    place: tuple[str, str, str], http: httpx.Client, id: str
) -> None:
    """With the reason, at its next call of any kind; then it may keep what it has."""
    path = f"/v1/conversations/{id}"
    url, archive, namespace = place
    with StateStore.open(url, archive=archive, namespace=namespace, archiver=False) as store:
        for call in (
            lambda lease: http.put(f"{path}/lease", json={"ttl": 30}, headers=lease),
            lambda lease: http.put(f"{path}/fields/a", json={"value": 1}, headers=lease),
            lambda lease: http.post(f"{path}/turns", json={"messages": [HI]}, headers=lease),
        ):
            taken = http.post(f"{path}/lease", json={"ttl": 30, "wait": 10}).json()
            lease = {"Lease": taken["lease"]}
            with ThreadPoolExecutor(1) as pool:
                stopping = pool.submit(store.session(id).stop, reason="enough", wait=10)
                answer = wait_for(lambda call=call, lease=lease: (it := call(lease)).status_code == 409 and it)
                assert answer.json()["error"] == "Stopped"
                assert "enough" in answer.json()["detail"]
                kept = http.post(f"{path}/turns", json={"set": {"kept": True}}, headers=lease)
                assert kept.status_code == 200
                assert http.request("DELETE", f"{path}/lease", headers=lease).json() == {"released": True}
                assert stopping.result().state == "stopped"
