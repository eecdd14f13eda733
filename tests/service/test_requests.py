"""Bodies of an absurd shape: each is refused before it is read as JSON, and without its limit it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from deploy.load import attacks
from distributed_state.errors import InvalidValue
from distributed_state.programs.service import requests
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.resources.conversations import Create

pytestmark = pytest.mark.unit

LIMITS = Limits(values=5_000, fields=500)
WITHOUT = {"values": 10**9, "depth": 10**9, "fields": 10**9, "messages": 10**9}


def asked(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    head = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": head, "state": {}}, receive)


async def read(body: bytes, limits: Limits) -> Create:
    request = asked(body)
    await requests.receive_body(request, limits)
    return requests.body(request, limits, Create)


@pytest.mark.parametrize(
    ("body", "why", "limit"),
    [
        (attacks.many_fields(5_000), "values", "values"),
        (attacks.many_fields(600), "fields has 600 entries", "fields"),
        (attacks.wide_and_deep(40_000, 2), "values", "values"),
        (attacks.deep(100), "nested deeper than 64", "depth"),
        (attacks.wide_and_deep(9_000, 65), "nested deeper than 64", "depth"),
        (b'{"fields": {"\\\\\\"[[": ' + b"[" * 65 + b"]" * 65 + b"}}", "nested deeper than 64", "depth"),
    ],
    ids=["members", "fields", "brackets", "deep", "deep again and again", "deep after an odd name"],
)
async def test_an_absurd_shape_is_refused_for_that_and_without_the_limit_for_nothing(
    body: bytes, why: str, limit: str
) -> None:
    with pytest.raises(InvalidValue, match=why):
        await read(body, LIMITS)
    with pytest.raises(InvalidValue, match=why):
        await read(body, replace(LIMITS, **(WITHOUT | {limit: getattr(LIMITS, limit)})))
    given = await read(body, replace(LIMITS, **WITHOUT))
    assert given.fields == json.loads(body)["fields"]


async def test_a_shape_that_is_allowed_is_read_to_its_limits() -> None:
    for body in (attacks.many_fields(500), attacks.deep(62)):
        assert (await read(body, LIMITS)).fields == json.loads(body)["fields"]


async def test_a_body_in_another_encoding_is_not_json() -> None:
    """Of which the shape would not be seen."""
    with pytest.raises(InvalidValue, match="not JSON"):
        await read('{"fields": {"a": "\u2200"}}'.encode("utf-16-le"), LIMITS)
