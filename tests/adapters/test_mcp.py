"""The service as a server of the Model Context Protocol, asked by the SDK's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from handled import ask as ask_person
from handled import make_stuck
from mcp.client.streamable_http import streamable_http_client
from typer.testing import CliRunner

from distributed_state import AsyncStateStore, ConfigurationError
from distributed_state.programs import service
from distributed_state.programs.cli import running, shell
from distributed_state.programs.service import mcp
from distributed_state.programs.service.authentication import Access, Authentication, Caller, callers_policy
from distributed_state.programs.service.resources import records
from distributed_state.values.access_tokens import RIGHTS
from tests.adapters.mcp_client import MODES, Client, MCPError, http_client
from tests.service.test_service import Worker

PATH = "/v1/mcp"
NAMES = {
    "get_state", "set_state", "append_message", "read_messages", "add_note", "list_notes", "delete_note", "search",
    "history", "list_sessions", "create_session", "fork_session", "rollback", "post_message",
    "list_questions", "answer_question", "retry_session",
}  # fmt: skip


class ByHeader(Authentication):
    """Recognizes whoever says so: tests say it truly."""

    def __init__(self) -> None:
        super().__init__(Access(insecure=True))

    async def caller(self, request: Any) -> Caller:
        given = request.headers
        rights = frozenset(each for each in RIGHTS if each in given.get("x-rights", "read write delete"))
        return Caller(actor=given.get("x-actor", "agent"), prefix=given.get("x-prefix", ""), rights=rights)


class Agent:
    """A client of the SDK, and what its tools say."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, name: str, **given: Any) -> Any:
        """What the tool says."""
        failed, text = await self.said(name, **given)
        assert not failed, text
        return json.loads(text)

    async def refused(self, name: str, **given: Any) -> str:
        """What the tool says of its error."""
        failed, text = await self.said(name, **given)
        assert failed, text
        return text

    async def said(self, name: str, **given: Any) -> tuple[bool, str]:
        found = await self.client.call_tool(name, given)
        (content,) = found.content
        return bool(found.is_error), content.text  # type: ignore[union-attr]


@asynccontextmanager
async def agent(url: str, transport: Any, mode: str, headers: dict[str, str]) -> AsyncIterator[Agent]:
    encoded = {name.encode(): value.encode() for name, value in headers.items()}
    async with (
        http_client.AsyncClient(transport=transport, headers=encoded, timeout=20) as http,
        Client(streamable_http_client(url + PATH, http_client=http), mode=mode) as client,
    ):
        yield Agent(client)


class Here:
    """The service in this process, and agents that ask it."""

    def __init__(self, store: AsyncStateStore, limits: service.Limits) -> None:
        self.service = service.Service(limits, ByHeader(), more=(mcp.operation(),))
        self.service.begin(store)
        self.store = store

    def agent(self, mode: str = "auto", **headers: str) -> Any:
        named = {f"x-{name}": value for name, value in headers.items()}
        return agent("http://here", http_client.ASGITransport(app=self.service.app), mode, named)


@pytest.fixture
def opened(servers: Any, tmp_path: Path, namespace: str) -> Callable[..., Any]:
    @asynccontextmanager
    async def opens(
        search: bool = False, limits: service.Limits | None = None, policy: bool = True, **settings: Any
    ) -> AsyncIterator[Here]:
        url = servers.redis("valkey").url
        archive = f"sqlite:///{tmp_path}/archive.db"
        access = callers_policy() if policy else None
        async with await AsyncStateStore.open(
            url, archive=archive, namespace=namespace, search=search, access=access, **settings
        ) as store:
            yield Here(store, limits or service.Limits())

    return opens


@pytest.mark.parametrize("mode", MODES)
async def test_an_agent_reads_and_writes_its_session_with_every_tool(opened: Any, mode: str) -> None:
    async with opened(search=True) as here, here.agent(mode, actor="ada") as ask:
        tools = (await ask.client.list_tools()).tools
        assert {each.name for each in tools} == NAMES
        for each in tools:
            assert each.description
            described = [part for name, part in each.input_schema["properties"].items() if name != "session"]
            assert all(part.get("description") for part in described), each.input_schema
        assert await ask("create_session", session="s1", fields={"city": "Oslo"}) == {"session": "s1", "version": 1}
        assert await ask("set_state", session="s1", fields={"nights": 3}, expect_version=1) == {"version": 2}
        assert "Conflict: " in await ask.refused("set_state", session="s1", fields={"nights": 4}, expect_version=1)
        large = {"large": 12345678901234567890123, "deep": {"a": [None, 1.5]}}
        await ask("set_state", session="s1", fields=large)
        state = await ask("get_state", session="s1")
        fields = {"city": "Oslo", "nights": 3, **large}
        assert state == {"session": "s1", "version": 3, "phase": None, "fields": fields}
        assert (await ask("get_state", session="s1", keys=["city", "none"]))["fields"] == {"city": "Oslo"}

        for number in range(5):
            await ask("append_message", session="s1", role="user", content=f"fjord {number}")
        last = await ask("read_messages", session="s1", limit=2)
        assert [each["content"] for each in last["messages"]] == ["fjord 3", "fjord 4"]
        assert last["more"] is True
        first = last["messages"][0]["number"]
        page = await ask("read_messages", session="s1", limit=2, before=first)
        assert [each["content"] for each in page["messages"]] == ["fjord 1", "fjord 2"]
        page = await ask("read_messages", session="s1", after=first)
        assert ([each["content"] for each in page["messages"]], page["more"]) == (["fjord 4"], False)

        noted = await ask("add_note", session="s1", note="likes quiet rooms")
        await ask("add_note", session="s1", key="z", note={"seat": "aisle"})
        notes = (await ask("list_notes", session="s1"))["notes"]
        assert {each["key"]: each["note"] for each in notes} == {
            noted["key"]: "likes quiet rooms",
            "z": {"seat": "aisle"},
        }
        await ask("delete_note", session="s1", key="z")
        assert "Conflict: " in await ask.refused("delete_note", session="s1", key="z")

        changes = (await ask("history", session="s1"))["changes"]
        assert [each["version"] for each in changes] == list(range(1, len(changes) + 1))
        assert {each["actor"] for each in changes} == {"ada"}
        assert changes[1]["set"] == {"nights": 3}
        forked = await ask("fork_session", session="s1", new_session="s2", version=2)
        assert (await ask("get_state", session="s2"))["fields"] == {"city": "Oslo", "nights": 3}
        assert forked["session"] == "s2"
        await ask("rollback", session="s1", version=1)
        assert (await ask("get_state", session="s1"))["fields"] == {"city": "Oslo"}
        await here.store.session("s1").checkpoint("Oslo")
        for place in ({"steps": 2}, {"label": "Oslo"}, {"checkpoints": 1}):
            await ask("set_state", session="s1", fields={"city": "Bergen"})
            await ask("set_state", session="s1", fields={"city": "Voss"})
            await ask("rollback", session="s1", **place)
            assert (await ask("get_state", session="s1"))["fields"] == {"city": "Oslo"}, place
        await ask("set_state", session="s1", fields={"city": "Bergen"})
        await ask("rollback", session="s1")
        assert (await ask("get_state", session="s1"))["fields"] == {"city": "Oslo"}
        assert "InvalidValue: " in await ask.refused("rollback", session="s1", steps=1, version=1)

        await here.store.admin.archive()
        rows = (await ask("list_sessions"))["sessions"]
        assert {each["session"] for each in rows} == {"s1", "s2"}
        page = await ask("list_sessions", limit=1)
        assert page["next"] is not None
        assert len((await ask("list_sessions", limit=1, after=page["next"]))["sessions"]) == 1
        await here.store.search("fjord", fresh=True)  # indexed from now on
        hits = (await ask("search", query="Oslo", session="s2"))["hits"]
        assert {each["id"] for each in hits} == {"s2"}


async def test_an_agent_posts_to_a_handler_and_tries_again_what_is_stuck(opened: Any) -> None:
    async with opened() as here, here.agent(prefix="a:") as ask:
        for id in ("a:1", "b:1"):
            await here.store.session(id).create()
        await make_stuck(here.store, "b:1")
        assert await ask("post_message", session="a:1", content="hi", handler="support") == {"number": 1}
        assert "Conflict: " in await ask.refused("post_message", session="a:1", content="hi", handler="other")
        assert "handler: " in await ask.refused("post_message", session="a:1", content="hi", handler="a b")
        assert await ask("retry_session", session="a:1") == {"retried": False}
        await make_stuck(here.store, "a:1")
        found = await ask("list_sessions", stuck=True)
        [row] = found["sessions"]
        assert (row["session"], row["schedule"]["handler"], row["schedule"]["error"], found["next"]) == (
            "a:1", "support", "ZeroDivisionError", None,
        )  # fmt: skip
        assert await ask("retry_session", session="a:1") == {"retried": True}
        assert (await ask("list_sessions", stuck=True))["sessions"] == []


async def test_an_agent_lists_open_questions_and_answers_one_once(opened: Any) -> None:
    async with opened() as here, here.agent(prefix="a:") as ask:
        for id in ("a:1", "a:2", "b:1"):
            await here.store.session(id, user=id[:2] + "ada").create()
            await ask_person(here.store, id, f"{id}?", name="q", data=["yes", "no"])
        listed = (await ask("list_questions"))["questions"]
        assert [(each["session"], each["question"], each["data"]) for each in listed] == [
            ("a:1", "a:1?", ["yes", "no"]),
            ("a:2", "a:2?", ["yes", "no"]),
        ]
        page = await ask("list_questions", limit=1)
        assert [each["session"] for each in page["questions"]] == ["a:1"]
        page = await ask("list_questions", limit=1, after=page["next"])
        assert [each["session"] for each in page["questions"]] == ["a:2"]
        given = {"session": "a:1", "question": "q", "value": "yes", "id": listed[0]["id"]}
        assert "no open question" in await ask.refused("answer_question", **given | {"id": "another"})
        assert await ask("answer_question", **given) == {"accepted": True}
        assert await ask("answer_question", **given) == {"accepted": False}
        assert [each["session"] for each in (await ask("list_questions"))["questions"]] == ["a:2"]
        assert [each.message.content for each in await here.store.session("a:1").inbox()] == ["yes"]


async def test_resources_are_the_state_and_the_messages_of_a_session(opened: Any) -> None:
    async with opened() as here:
        async with here.agent() as ask:
            await ask("create_session", session="a:1 ü", fields={"n": 1})
            await ask("append_message", session="a:1 ü", role="user", content="hi")
            assert (await ask.client.list_resources()).resources == []
            templates = (await ask.client.list_resource_templates()).resource_templates
            assert {each.uri_template for each in templates} == {"state://{session}", "messages://{session}"}
        async with here.agent(prefix="a:", **{"session-id": "a:1 ü"}) as ask:
            listed = (await ask.client.list_resources()).resources
            read = {}
            for each in listed:
                (content,) = (await ask.client.read_resource(each.uri)).contents
                read[each.name] = json.loads(content.text)  # type: ignore[union-attr]
            assert read["state"]["fields"] == {"n": 1}
            assert [each["content"] for each in read["messages"]["messages"]] == ["hi"]
            assert (await ask("get_state"))["session"] == "a:1 ü", "the header names it"
            for uri in ("state://nobody", "messages://b:1", "state://", "luck://a:1"):
                with pytest.raises(MCPError) as refused:
                    await ask.client.read_resource(uri)
                assert "Traceback" not in str(refused.value)


OF_SESSION: dict[str, dict[str, Any]] = {
    "get_state": {},
    "set_state": {"fields": {"a": 1}},
    "append_message": {"role": "user", "content": "x"},
    "post_message": {"content": "x"},
    "answer_question": {"value": "yes"},
    "retry_session": {},
    "read_messages": {},
    "add_note": {"note": "x"},
    "list_notes": {},
    "delete_note": {"key": "x"},
    "history": {},
    "fork_session": {},
    "rollback": {"version": 1},
}


async def test_a_session_that_is_not_there_or_not_named_is_an_error_and_none_begins(opened: Any) -> None:
    async with opened() as here, here.agent() as ask:
        for name, given in OF_SESSION.items():
            text = await ask.refused(name, session="nobody", **given)
            assert text.split(":")[0] in ("NotFound", "Conflict"), f"{name}: {text}"
            assert "InvalidValue: name the session" in await ask.refused(name, **given)
        assert not await here.store.session("nobody").exists(fresh=True)
        wrong = await ask.refused("read_messages", session="s", limit=0)
        assert "InvalidValue: read_messages: limit: " in wrong
        assert "nights" in await ask.refused("get_state", session="s", nights=1)
        with pytest.raises(MCPError, match="there is no tool 'fly'"):
            await ask.client.call_tool("fly", {})


async def test_a_tool_is_refused_without_its_right_and_not_shown(opened: Any) -> None:
    async with opened() as here:
        await here.store.session("s").create({"a": 0})
        for rights in ("read", "write", "delete"):
            async with here.agent(rights=rights, actor="eve") as ask:
                shown = {each.name for each in (await ask.client.list_tools()).tools}
                assert shown == {name for name, each in mcp.TOOLS.items() if each.right == rights}
                for name in OF_SESSION.keys() - shown:
                    text = await ask.refused(name, session="s", **OF_SESSION[name])
                    assert text == f"AccessDenied: 'eve' has no right to {mcp.TOOLS[name].right}"
        assert await here.store.session("s").version(fresh=True) == 1


async def foreign(here: Here) -> list[str]:
    """What tools of tenant a let it do to tenant b's."""
    done = []
    await here.store.session("b:1").create({"secret": 1})
    async with here.agent(prefix="a:") as ask:
        asked = [(name, {"session": "b:1", **given}) for name, given in OF_SESSION.items()]
        await ask("create_session", session="a:1")
        asked += [
            ("create_session", {"session": "b:2"}),
            ("create_session", {"session": "a:2", "user": "b:u"}),
            ("fork_session", {"session": "a:1", "new_session": "b:3"}),
            ("list_sessions", {"prefix": "b"}),
            ("list_sessions", {"user": "b:u"}),
            ("list_questions", {"user": "b:u"}),
            ("search", {"query": "x", "session": "b:1"}),
        ]
        for name, given in asked:
            failed, text = await ask.said(name, **given)
            if not (failed and text.startswith("AccessDenied: ")):
                done.append(name)
        for uri in ("state://b:1", "messages://b%3A1"):
            with contextlib.suppress(MCPError):
                await ask.client.read_resource(uri)
                done.append(uri)
    return done


async def test_another_tenants_sessions_can_neither_be_read_nor_written_nor_listed(opened: Any) -> None:
    async with opened(search=True) as here:
        assert await foreign(here) == []
        assert await here.store.session("b:1").version(fresh=True) == 1
        await here.store.admin.archive()
        async with here.agent(prefix="a:") as ask:
            made = (await ask("create_session"))["session"]
            assert made.startswith("a:")
            assert (await ask("fork_session", session=made))["session"].startswith("a:")
            await here.store.admin.archive()
            rows = (await ask("list_sessions"))["sessions"]
            assert len(rows) == 3
            assert all(each["session"].startswith("a:") for each in rows)
            await ask("append_message", session=made, role="user", content="secret")
            await here.store.session("b:1").append({"role": "user", "content": "secret"})
            found = await here.store.search("secret", fresh=True)
            assert {each.id for each in found} == {made, "b:1"}
            assert {each["id"] for each in (await ask("search", query="secret"))["hits"]} == {made}


async def test_without_the_check_of_prefixes_another_tenant_is_read(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: it would show it."""
    monkeypatch.setattr(records, "within", lambda asked, id: id)
    async with opened(policy=False) as here:
        assert {"get_state", "set_state", "add_note", "fork_session"} <= set(await foreign(here))


async def test_what_is_too_large_is_refused_and_a_failure_says_nothing_of_the_inside(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = service.Limits(body=20_000, answer=20_000, fields=5)
    async with opened(limits=limits) as here, here.agent() as ask:
        await here.store.session("s").create({"a": "x" * 15_000, "b": "x" * 15_000})
        assert "the fields are 30004 bytes, more than 20000" in await ask.refused("get_state", session="s")
        assert "changes are " in await ask.refused("history", session="s")
        assert (await ask("get_state", session="s", keys=["a"]))["version"] == 1
        many = {f"f{number}": 0 for number in range(6)}
        assert "fields has 6 entries, more than the 5" in await ask.refused("set_state", session="s", fields=many)
        transport = http_client.ASGITransport(app=here.service.app)
        async with http_client.AsyncClient(transport=transport, base_url="http://here") as http:
            assert (await http.post(PATH, json={"c": "x" * 30_000})).status_code == 413
        assert await here.store.session("s").version(fresh=True) == 1

        async def broken(self: Any, asked: Any) -> Any:
            raise RuntimeError("redis://user:password@host")

        monkeypatch.setattr(mcp.TOOLS["get_state"], "run", broken)
        text = await ask.refused("get_state", session="s")
        assert text.startswith("InternalError: ")
        assert "password" not in text


async def test_a_call_counts_as_one_operation_and_has_its_limits(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(self: Any, asked: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(mcp.TOOLS["get_state"], "run", endless)
    async with opened(limits=service.Limits(request=0.3, requests=1)) as here:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "get_state", "arguments": {}}}
        headers = {"accept": "application/json, text/event-stream"}
        transport = http_client.ASGITransport(app=here.service.app)
        async with http_client.AsyncClient(transport=transport, base_url="http://here", headers=headers) as http:
            slow = asyncio.create_task(http.post(PATH, json=call))
            await begun.wait()
            assert (await http.post(PATH, json=call)).status_code == 429
            assert (await slow).status_code == 503
            await asyncio.wait_for(ended.wait(), 10)
            metrics = (await http.get("/metrics")).text
            assert f'requests_total{{method="POST",route="{PATH}",status="503"}} 1.0' in metrics
            assert f'requests_total{{method="POST",route="{PATH}",status="429"}} 1.0' in metrics
            for method in ("GET", "DELETE"):
                assert (await http.request(method, PATH)).status_code == 405, "there is no stream to hold, no session"


async def test_sessions_that_an_agent_begins_count_against_the_quota_of_its_tenant(opened: Any) -> None:
    async with opened(limits=service.Limits(tenant_conversations=2)) as here, here.agent(prefix="a:") as ask:
        await ask("create_session", session="a:1")
        await ask("fork_session", session="a:1")
        for name in ("create_session", "fork_session"):
            assert "already has 2 conversations" in await ask.refused(name, session="a:1")


WRITES: dict[str, dict[str, Any]] = {
    "set_state": {"fields": {"a": 1}},
    "append_message": {"role": "user", "content": "hello"},
    "post_message": {"content": "hello"},
    "add_note": {"key": "k", "note": "n"},
    "delete_note": {"key": "k"},
}


async def test_expired_sessions_that_an_agent_begins_again_count_against_the_quota(opened: Any) -> None:
    settings = {"expired": "begin again", "sweep": 0.02}
    async with (
        opened(limits=service.Limits(tenant_conversations=1), **settings) as here,
        here.agent(prefix="a:") as ask,
        here.store.events("session.expired") as events,
    ):
        for name in ("a:first", *map("a:{}".format, WRITES)):
            await here.store.session(name, idle=0.001).set("x", 1)
            await events.next(timeout=20)
        await here.store.admin.archive()
        await ask("set_state", session="a:first", fields={"a": 1})
        for name, given in WRITES.items():
            assert "already has 1 conversations" in await ask.refused(name, session=f"a:{name}", **given)


async def test_no_caller_no_tool(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(self: Any, request: Any) -> Caller:
        raise service.app.AccessDenied("who are you")

    monkeypatch.setattr(ByHeader, "caller", nobody)
    async with opened() as here:
        transport = http_client.ASGITransport(app=here.service.app)
        async with http_client.AsyncClient(transport=transport, base_url="http://here") as http:
            answer = await http.post(PATH, content=b"not even JSON")
            assert (answer.status_code, answer.json()["error"]) == (403, "AccessDenied")


class Alternating(http_client.AsyncBaseTransport):
    """A load balancer: each request goes to the next worker."""

    def __init__(self, *urls: str) -> None:
        self._urls = [http_client.URL(each) for each in urls]
        self._below = http_client.AsyncHTTPTransport()
        self.sent = [0] * len(urls)

    async def handle_async_request(self, request: http_client.Request) -> http_client.Response:
        number = sum(self.sent) % len(self._urls)
        self.sent[number] += 1
        request.url = request.url.copy_with(host=self._urls[number].host, port=self._urls[number].port)
        return await self._below.handle_async_request(request)

    async def aclose(self) -> None:
        await self._below.aclose()


@pytest.mark.wide
async def test_two_workers_serve_the_agent_of_a_token_alternately_and_concurrent_writes_are_all_kept(
    servers: Any, tmp_path: Path, namespace: str
) -> None:
    url, archive = servers.redis("valkey").url, f"sqlite:///{tmp_path}/archive.db"
    place = ("--url", url, "--archive", archive, "--namespace", namespace)
    made = [*place, "token", "create", "--tenant", "acme", "--rights", "read,write", "--actor", "ada"]
    words = (*place, "--mcp", "--tokens", "--notice", "0.05")
    with Worker(*words) as one, Worker(*words) as other:
        token = await asyncio.to_thread(lambda: CliRunner().invoke(shell.app, made).stdout.strip())
        balancer = Alternating(one.ready().url, other.ready().url)
        for mode in MODES:
            headers = {"authorization": f"Bearer {token}", "x-session-id": f"acme:{mode}"}
            async with agent(one.url, balancer, mode, headers) as ask:
                await ask("create_session", session=f"acme:{mode}")
                for number in range(4):
                    await ask("set_state", fields={"n": number})
                    assert (await ask("get_state"))["fields"] == {"n": number}, "what it wrote with the other worker"
                version = (await ask("get_state"))["version"]
                change = {"fields": {"n": 9}, "expect_version": version}
                failed = await asyncio.gather(*(ask.said("set_state", **change) for _ in range(8)))
                assert [each for each, _ in failed].count(False) == 1, "one of them was first"
                said = (ask("append_message", role="user", content=str(number)) for number in range(16))
                await asyncio.gather(*said)
                found = await ask("read_messages", limit=50)
                assert sorted(int(each["content"]) for each in found["messages"]) == list(range(16))
                assert {each["actor"] for each in (await ask("history"))["changes"]} == {"ada"}
                assert "AccessDenied: " in await ask.refused("get_state", session="b:1")
                assert "no right to delete" in await ask.refused("delete_note", key="x")
        assert min(balancer.sent) > 10 * len(MODES)
        assert one.post(PATH).status_code == 401
        answers = [one.get("/healthz"), other.get("/healthz")]
        assert [each.status_code for each in answers] == [200, 200]


async def test_the_endpoint_is_there_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = http_client.ASGITransport(app=service.Service().app)
    async with http_client.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.post(PATH)).status_code == 404
    for name in [each for each in sys.modules if each.startswith(mcp.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("mcp", "mcp_sdk"):
        monkeypatch.delattr(service, module)
    monkeypatch.setitem(sys.modules, "mcp", None)  # as where the SDK is not installed
    with pytest.raises(ConfigurationError, match=r"--mcp needs mcp: run `pip install 'distributed-state\[mcp\]'`"):
        running._mcp()


async def test_a_large_text_is_not_given_to_the_sdk_and_arrives_whole(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would copy it some ten times."""
    given: list[int] = []
    kept = mcp._Collected.keep

    def keep(self: Any, text: str) -> str:
        word = kept(self, text)
        given.append(len(word))
        return word

    said = [f'"{number}" \u00fc\U0001f600\\' * 5_000 for number in range(3)]
    async with opened() as here, here.agent() as ask:
        await ask("create_session", session="s")
        for text in said:
            await ask("append_message", session="s", role="user", content=text)
        monkeypatch.setattr(mcp._Collected, "keep", keep)
        found = (await ask("read_messages", session="s"))["messages"]
        assert [each["content"] for each in found] == said
        changes = (await ask("history", session="s"))["changes"]
        assert [each["appended"][0]["content"] for each in changes if each["appended"]] == said
    assert len(given) == 2
    assert max(given) < 100


async def test_a_message_is_left_in_the_inbox_of_a_session_once(opened: Any) -> None:
    async with opened() as here, here.agent() as ask:
        await ask("create_session", session="s")
        for _ in range(2):
            assert await ask("post_message", session="s", content="hi", request_id="r") == {"number": 1}
        (waiting,) = await here.store.session("s").inbox()
        assert (waiting.message.role, waiting.message.content, waiting.request_id) == ("user", "hi", "r")
