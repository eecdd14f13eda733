"""The tokens of models over HTTP: counted with turns, added up for those who may read them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from serving import served

from distributed_state import ConfigurationError, InvalidValue, RemoteStore, StateStore, UsageExceeded
from distributed_state.programs.servers import redis_server
from distributed_state.results import Tokens, Usage
from tests.service.test_schedules import ONE, other, serving

NONE = {"calls": 0, "input_tokens": 0, "output_tokens": 0, "models": {}}


def used(calls: int, read: int, written: int) -> dict[str, int]:
    return {"calls": calls, "input_tokens": read, "output_tokens": written}


async def test_a_turn_brings_its_tokens_which_the_conversation_adds_up() -> None:
    async with serving() as (_, service, writer):
        assert await writer.ask("GET", ONE + "/usage") == NONE
        body = {"set": {"n": 1}, "usage": {"gpt-5": used(2, 812, 90), "mini": {"input_tokens": 5}}, "request_id": "r"}
        for repeated in (False, True):
            done = await writer.ask("POST", ONE + "/turns", json=body)
            assert done["repeated"] is repeated
        await writer.ask("POST", ONE + "/turns", json={"usage": {"mini": {"output_tokens": 1}}})
        sums = {"gpt-5": used(2, 812, 90), "mini": used(2, 5, 1)}
        assert await writer.ask("GET", ONE + "/usage") == used(4, 817, 91) | {"models": sums}
        authorized = {"Authorization": f"Bearer {writer.token}"}
        known = await service.http.get(ONE + "/usage", headers=authorized | {"If-None-Match": '"3"'})
        assert known.status_code == 304
        versions = (await writer.ask("GET", ONE + "/versions"))["versions"]
        assert [each["usage"] and each["usage"]["calls"] for each in versions] == [None, 3, 1]
        timeline = (await writer.ask("GET", ONE + "/timeline"))["versions"]
        assert [each["usage"] for each in timeline] == [each["usage"] for each in versions[::-1]]


async def test_a_turn_is_refused_above_its_bound() -> None:
    async with serving() as (store, served, writer):
        await writer.ask("POST", ONE + "/turns", json={"usage": {"m": {"input_tokens": 99}}, "usage_below": 1})
        body: dict[str, Any] = {"set": {"n": 2}, "usage_below": 99}
        refused = await served.ask("POST", ONE + "/turns", writer.token, json=body)
        problem = refused.json()
        assert (refused.status_code, problem["error"]) == (409, "UsageExceeded")
        assert (problem["tokens"], problem["limit"]) == (99, 99)
        assert await store.session("acme:c").get("n") == 0
        await writer.ask("POST", ONE + "/turns", json=body | {"usage_below": 100})


@pytest.mark.parametrize("usage", [{"": {}}, {"m": {"calls": -1}}, {"m" * 101: {}}, {"m": 7}, {"a\0": {}}])
async def test_other_counts_are_refused(usage: Any) -> None:
    async with serving() as (_, _served, writer):
        assert await writer.status("POST", ONE + "/turns", json={"usage": usage}) == 422
        many = {f"m{number}": {} for number in range(51)}
        assert await writer.status("POST", ONE + "/turns", json={"usage": many}) == 422
        assert await writer.ask("GET", ONE + "/usage") == NONE


async def test_sums_have_only_what_their_reader_may_read() -> None:
    async with serving() as (store, served, writer):
        for id, user, tokens in ("acme:c", "acme:ada", 1), ("acme:d", "acme:bob", 10), ("evil:c", "evil:eve", 100):
            async with store.session(id, user=user).turn() as turn:
                turn.model("m", input_tokens=tokens)
        found = await writer.ask("GET", "/v1/usage?fresh=true")
        assert found["models"] == {"m": used(2, 11, 0)}
        assert sum(each["input_tokens"] for each in found["days"].values()) == 11
        assert (await writer.ask("GET", "/v1/usage?user=acme:bob&fresh=true"))["input_tokens"] == 10
        later = f"/v1/usage?fresh=true&since={time.time() + 2 * 86_400}"
        assert await writer.ask("GET", later) == NONE | {"days": {}}
        assert await writer.status("GET", "/v1/usage?user=evil:eve") == 403
        assert await writer.status("GET", "/v1/conversations/evil:c/usage") == 403
        assert await writer.status("GET", "/v1/conversations/acme:none/usage") == 404
        blind = await other(served, "acme:", "write")
        assert await blind.status("GET", ONE + "/usage") == await blind.status("GET", "/v1/usage") == 403


async def test_a_remote_store_counts_as_a_direct_one(tmp_path: Path) -> None:
    with redis_server() as server:
        archive = f"sqlite:///{tmp_path}/a.db"
        with (
            StateStore.open(server.url, archive=archive, namespace=tmp_path.name) as direct,
            served(server.url, archive, tmp_path.name) as client,
            RemoteStore.open(str(client.base_url)) as store,
        ):
            session = store.session("c", user="ada")
            assert session.usage() == Usage()
            with session.turn(request_id="r", usage_below=1) as turn:
                with turn.model("gpt-5") as call:
                    call.used(input_tokens=812, output_tokens=90)
                turn.model("mini", input_tokens=5)
                assert turn.usage.models == {"gpt-5": Tokens(1, 812, 90), "mini": Tokens(1, 5, 0)}
            with session.turn() as turn:
                turn.model("mini", output_tokens=1)
            assert session.usage() == direct.session("c").usage(fresh=True)
            assert session.usage().tokens == 908
            assert [each.usage for each in session.history()] == [each.usage for each in direct.session("c").history()]
            assert session.history()[0].times.runs[0].name == "gpt-5"
            with pytest.raises(UsageExceeded) as refused, session.turn(usage_below=908):
                pass
            assert (refused.value.tokens, refused.value.limit) == (908, 908)
            with session.turn(request_id="r", usage_below=1) as turn:
                assert turn.repeated
            found = store.usage(user="ada", since=datetime.now(UTC), fresh=True)
            assert found == direct.usage(user="ada", fresh=True)
            assert found.tokens == 908
            with pytest.raises(ConfigurationError, match="prefix"):
                store.usage(prefix="c")
            with pytest.raises(InvalidValue, match="input_tokens"), session.turn() as turn:
                turn.model("m", input_tokens=-1)
