"""Ids, keys and other names over HTTP: each one that the library takes is written, listed, read and erased."""

from __future__ import annotations

import html
import http.client
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from names import NAMES, DecodingProxy, tidied
from serving import served
from tenants import Served, opened

from distributed_state import NotFound, RemoteStore, TooLarge
from distributed_state.programs.inspector import PATH, inspector
from distributed_state.programs.service import Access
from distributed_state.programs.service.running import mount
from distributed_state.values import as_text
from distributed_state.values.access_tokens import RIGHTS
from distributed_state.values.model import Ref

HI = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}
FEW = settings(
    max_examples=settings.default.max_examples // 10, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
KEYS = NAMES.filter(lambda name: name[0] != "#")
COLLECTIONS = NAMES.filter(lambda name: "\0" not in name and len(name.encode("utf-8", "surrogatepass")) <= 64)
NAMED: dict[str, Any] = {"id": NAMES, "key": KEYS, "collection": COLLECTIONS, "item": NAMES | st.just("")}
KINDS = "conversations", "users", "tasks"


@pytest.fixture
def client(namespace: str) -> Iterator[httpx.Client]:
    with served(None, "memory", namespace) as client:
        yield client


def taken(id: str) -> bool:
    """Whether the library takes it, which has a bound."""
    try:
        Ref("session", id)
    except TooLarge:
        return False
    return True


def once(client: httpx.Client, id: str) -> bool:
    """Whether to use this id with this service: one that was erased there is gone for a while."""
    used: set[str] = vars(client).setdefault("used", set())
    used, first = used | {id}, id not in used
    vars(client)["used"] = used
    return first and taken(id)


class Asking:
    """Asks with a path as it is: a client of a library's might tidy it up. One of the two forms of names."""

    def __init__(self, url: str, form: str) -> None:
        self.place = httpx.URL(url)
        self.form = form

    def path(self, form: str, *names: str) -> str:
        made = {"": as_text.quoted, "/base64": as_text.in_base64}[self.form]
        return f"/v1{self.form}" + form.format(*map(made, names))

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(self.place.host, self.place.port, timeout=30)
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {} if body is None else JSON)
        answer = connection.getresponse()
        self.link = answer.getheader("Link") or ""
        said = json.loads(answer.read())
        connection.close()
        assert answer.status < 300, (method, path, said)
        return said


_round = itertools.count()


@pytest.mark.parametrize("form", ["", "/base64"])
@FEW
@given(kinds=st.sampled_from(KINDS).map(lambda kind: (kind,)), **NAMED)
@example(kinds=KINDS, id="app/user/id", key="a/b", collection="c/d", item="e/f")
@example(kinds=KINDS[:1], id="..", key="..", collection="..", item="..")
@example(kinds=KINDS[1:2], id="%2F", key="%41", collection="%25", item="%2e")
@example(kinds=KINDS[2:], id="\ud800", key="\ud800", collection="\ud800", item="\ud800")
@example(kinds=KINDS[:1], id="x" * 1024, key="ä" * 512, collection="é" * 32, item="日" * 341)
def test_each_name_is_written_and_read_at_its_path(
    client: httpx.Client, form: str, kinds: tuple[str, ...], id: str, key: str, collection: str, item: str
) -> None:
    ask = Asking(str(client.base_url), form)
    if not once(client, id):
        return
    for kind in kinds:
        one = ask.path(f"/{kind}/{{}}", id)
        if kind != "users":
            ask("POST", f"/v1/{kind}", {"id": id})
        field = ask.path(f"/{kind}/{{}}/fields/{{}}", id, key)
        ask("PUT", field, {"value": 7})
        assert ask("GET", field)["value"] == 7
        assert ask("GET", f"{one}/fields")["fields"] == {key: 7}
        items = ask.path(f"/{kind}/{{}}/items/{{}}", id, collection)
        ask("PATCH", items, {"put": {item: 8, f"{item}2": 9}})
        assert ask("GET", ask.path(f"/{kind}/{{}}/items/{{}}/{{}}", id, collection, item))["value"] == 8
        assert [each["key"] for each in ask("GET", f"{items}?limit=1")["items"]] == [item]
        following = ask.link.partition("<")[2].partition(">")[0]
        assert [each["key"] for each in ask("GET", following)["items"]] == [f"{item}2"]
        listed = quote(id.encode("utf-8", "surrogatepass"), safe="")
        assert id in [each["id"] for each in ask("GET", f"/v1/{kind}?prefix={listed}&fresh=true")[kind]]
        assert ask("GET", one)["id"] == id
        assert ask("DELETE", f"{one}/everything")["erased"] is True


@FEW
@given(**NAMED)
@example(id="app/user/id", key="..", collection="%2F", item="\ud800")
@example(id="..", key="\ud800", collection="c/d", item="%2e")
def test_each_name_is_what_it_is_to_the_remote_client(
    client: httpx.Client, id: str, key: str, collection: str, item: str
) -> None:
    if once(client, id):
        with RemoteStore.open(str(client.base_url)) as store:
            written_and_read(store, id, key, collection, item)


def written_and_read(store: RemoteStore, id: str, key: str, collection: str, item: str) -> None:
    """Everything of a remote store that has a name in its path, or behind it."""
    user, session, task = store.user(id), store.session(id, user=id), store.task(id, user=id)
    for record in user, session, task:
        with record.lock():
            record.set(key, 1)
        assert record.get(key) == record.increment(key, 2) - 2 == 1
        record.items(collection).put_many({item: 1, f"{item}2": 2})
        assert record.items(collection).get(item) == 1
        assert record.items(collection).list(after=item).items[0].key == f"{item}2"
        record.tags()
        assert record.get_all() == {key: 3}
        assert record.at(version=record.version()).fields == {key: 3}
        assert record.history()[-1].items[collection, f"{item}2"] is not None
        with pytest.raises(NotFound):
            store.admin.drop_branch(record.id, "none/such")
    session.append(HI)
    assert session.messages()[0].content == "hi"
    assert id in [each.id for each in store.sessions(user=id, fresh=True)]
    fork = f"f{next(_round)}/{id[:900]}"
    if taken(fork):
        session.fork(fork)
        assert store.session(fork).get(key) == 3
    assert store.forget(id) >= 3
    assert not session.exists()


def test_a_proxy_that_decodes_paths_changes_no_name(client: httpx.Client) -> None:
    with DecodingProxy(str(client.base_url)) as proxy:
        percent = Asking(proxy.url, "")
        percent("POST", "/v1/conversations", {"id": "control/1"})
        with pytest.raises(AssertionError, match="Not Found"):  # the negative control
            percent("GET", percent.path("/conversations/{}", "control/1"))
        encoded = Asking(proxy.url, "/base64")
        assert encoded("GET", encoded.path("/conversations/{}", "control/1"))["id"] == "control/1"
        with RemoteStore.open(proxy.url) as store:
            names = "app/user/id", "..", "a//b", "%2F", "?#", "\ud800", "é", "x y"
            for at in range(0, len(names), 4):
                written_and_read(store, *names[at : at + 4])


def test_a_made_record_is_where_its_location_says(client: httpx.Client) -> None:
    with DecodingProxy(str(client.base_url)) as proxy, httpx.Client(base_url=proxy.url, headers=JSON) as behind:
        for name in "plain-1", "a/b/../c", "..":
            made = behind.post("/v1/conversations", json={"id": f"{name}"})
            assert behind.get(made.headers["location"]).json()["id"] == name
            fork = behind.post(f"{made.headers['location']}/forks", json={"id": f"{name}/fork"})
            assert behind.get(fork.headers["location"]).json()["id"] == f"{name}/fork"


UNNAMED = (
    ("/v1/conversations/%FF", 422), ("/v1/conversations/%C0%AF", 422), ("/v1/conversations/%ED%A0", 422),
    ("/v1/base64/conversations/_w", 422), ("/v1/base64/conversations/YS9", 422),
    ("/v1/base64/conversations/a!b", 422), ("/v1/conversations//fields", 404),
    ("/v1/base64/conversations//fields", 404), ("/v1%2Fconversations/c", 404), ("/v1/conversations%2Fc", 404),
    ("/v1/users?prefix=%FF", 422), ("/v1/conversations/a/../b", 404),
    ("x/v1/caller", 404), ("ftp://localhost/v1/caller", 404), ("*", 404), ("/v1/%62ase64/conversations/YQ", 404),
)  # fmt: skip


def test_a_path_that_names_nothing_is_refused(client: httpx.Client) -> None:
    for path, status in UNNAMED:
        connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 0, timeout=30)
        connection.request("GET", path)
        assert connection.getresponse().status == status, path
        connection.close()


def test_one_request_in_both_forms_is_one_request(client: httpx.Client) -> None:
    """A client that repeats it behind another proxy may have to write its path otherwise."""
    client.post("/v1/conversations", json={"id": "once/more"})
    key = {"Idempotency-Key": "k"}
    answers = [
        client.post(f"{path}/writes", json={"set": {"a": 1}}, headers=key).json()
        for path in (
            "/v1/conversations/once%2Fmore", "/v1/conversations/%6Fnce%2Fmore",
            "/v1/base64/conversations/b25jZS9tb3Jl",
        )
    ]  # fmt: skip
    assert [(each["version"], each["repeated"]) for each in answers] == [(2, False), (2, True), (2, True)]
    other, again = (
        client.put(f"/v1/conversations/once%2Fmore/fields/{key}", json={"value": 1}, headers={"Idempotency-Key": "j"})
        for key in ("a%2Fb", "a%2fc")
    )
    assert (other.status_code, again.status_code) == (200, 422), "another field is another request"


# Attacks: what is allowed is what is done


def spelled(name: str, how: list[int]) -> str:
    """A name in a path: each byte as it is, percent-encoded in either case, or twice."""
    ways = [
        lambda byte: chr(byte) if 0x20 < byte < 0x7F and byte not in b"%?#" else f"%{byte:02x}",
        lambda byte: f"%{byte:02X}", lambda byte: f"%{byte:02x}", lambda byte: f"%25{byte:02x}",
    ]  # fmt: skip
    return "".join(ways[how[at % len(how)]](byte) for at, byte in enumerate(name.encode("utf-8", "surrogatepass")))


IDS = (
    "acme:c", "acme:c/evil:c", "acme:../evil:c", "acme:x/../../conversations/evil:c", "acme:c/../../v1/users/evil:c",
    "acme:%2e%2e", "acme:\ud800", "acme:base64", "evil:c", "evil:acme:", "../evil:c", "..", ".", "base64/evil:c",
    "\0acme:c", "acme\uff1ac", "ACME:c",
)  # fmt: skip


async def asked(app: Any, target: str, token: str) -> tuple[int, str]:
    """The status and the text of an answer, to a target as it is, as uvicorn passes it on."""
    path, _, query = target.partition("?")
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {token}".encode())]
    await app(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": headers, "client": ("10.1.2.3", 5000), "server": ("localhost", 80), "state": {},
        },
        receive, send,
    )  # fmt: skip
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]).decode()


async def test_the_id_that_is_allowed_is_the_id_that_is_read() -> None:
    """Each spelling of ids of others and of one's own: asked for by a tenant, of the service and of its pages.

    A path means the name that it has when each of its parts is decoded once, and nothing else.
    """
    targets: dict[str, str] = {}
    for id in IDS:
        for start in "/v1", PATH:
            targets[f"{start}/conversations/{as_text.quoted(id)}"] = id
            targets[f"{start}/base64/conversations/{as_text.in_base64(id)}"] = id

    @settings(FEW, max_examples=2 * settings.default.max_examples)
    @given(
        id=st.sampled_from(IDS), how=st.lists(st.integers(0, 3), min_size=1, max_size=4), base=st.booleans(),
        below=st.sampled_from(["", "/fields", "/versions/1", "page"]),
    )  # fmt: skip
    def spell(id: str, how: list[int], base: bool, below: str) -> None:
        part = spelled(as_text.in_base64(id) if base else id, how)
        start = PATH if below == "page" else "/v1"
        target = f"{start}{'/base64' if base else ''}/conversations/{part}{below.removeprefix('page')}"
        if "/" not in part:  # else they are several parts, and name nothing
            try:
                meant = (as_text.read_base64 if base else as_text.read)(part.encode())
            except ValueError:
                meant = ""
            targets[target] = meant
        else:
            targets[target] = ""

    spell()
    async with opened() as store:
        service = Served(store, Access(tokens=True))
        mount(service.service.app, PATH, inspector(service.service.app))
        token = await service.token("acme:", *RIGHTS)
        for id in IDS:
            await store.session(id).create({"whose": id})
        read = set()
        for target, meant in targets.items():
            status, text = await asked(service.service.app, target, token)
            if status == 200:
                assert meant.startswith("acme:"), target
                if target.startswith(PATH):
                    shown = html.escape(meant.encode("utf-8", "backslashreplace").decode(), quote=False)
                    assert f'<b>whose</b> <span class="text">{shown}</span>' in text, target
                else:
                    assert json.loads(text)["fields"] == {"whose": meant}, target
                read.add((target.split("/")[1], target.split("/")[2] == "base64", meant))
            else:
                assert not (meant.startswith("acme:") and meant in IDS), (target, status, text)
                assert status in (403, 404, 422), (target, status)
        own = {each for each in IDS if each.startswith("acme:")}
        for place in itertools.product(("v1", "inspect"), (True, False)):
            assert {each[2] for each in read if each[:2] == place} == own, "the control"


# The inspector


async def test_the_inspector_opens_and_steers_what_it_lists() -> None:
    """By its own links and forms alone, which a browser follows as they are."""
    async with opened() as store:
        service = Served(store, Access(tokens=True))
        mount(service.service.app, PATH, inspector(service.service.app))
        token = await service.token("", *RIGHTS)

        async def get(target: str) -> str:
            path, _, query = target.partition("?")
            status, text = await asked(service.service.app, tidied(path) + (f"?{query}" if query else ""), token)
            assert status == 200, (target, text)
            return text

        async def offered() -> set[str]:
            return set(re.findall(rf'href="({PATH}/[^"]+/take-over)"', await get(f"{PATH}/live")))

        async def post(target: str, cookie: str = "", **given: str) -> httpx.Response:
            headers = {"Sec-Fetch-Site": "same-origin", "Authorization": f"Bearer {token}", "Cookie": cookie}
            found = await service.http.post(target, data=given, headers=headers)
            assert found.status_code == 303, (target, found.text)
            return found

        for id in ("app/user/id", "a/../b", "..", "?#%2F&<", "\ud800", "a\nb", "é" * 512, "日本 /"):
            session = store.session(id, user=id)
            await session.create({"city": "Oslo"})
            await session.set("city", "Bergen")
            await store.admin.archive()
            (page,) = set(re.findall(rf'<td><a href="({PATH}/[^"]+)"', await get(f"{PATH}/")))
            shown = await get(page)
            assert "Bergen" in shown
            links = re.findall(r'href="([^"]+)"', shown)
            for each in links:
                if each.startswith(page):
                    await get(html.unescape(each).partition("#")[0])
            assert {"graph", "fork", "export", "erase"} <= {each.rpartition("/")[2].partition("?")[0] for each in links}
            before = await offered()
            taken = await service.ask("POST", as_text.path("/v1", "/conversations/{}/lease", id), token, json={})
            assert taken.status_code == 201
            (over,) = await offered() - before
            assert f'action="{over}"' in await get(over)
            kept = (await post(over, seconds="60")).headers["set-cookie"].partition(";")[0]
            assert len(kept) < 4096, "a browser keeps no longer one"
            await post(f"{page}/rollback", kept, version="1")
            assert await session.get("city", fresh=True) == "Oslo"
            typed = re.sub(r"\n", "", id.encode("utf-8", "backslashreplace").decode())
            await post(f"{page}/erase", kept, typed=typed)
            assert not await session.exists(fresh=True)
