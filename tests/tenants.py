"""A service in this process with tokens of several tenants, and its operations with what they are asked with."""

from __future__ import annotations

import re
from typing import Any

import httpx

from distributed_state import AsyncStateStore
from distributed_state.programs.service import Access, Service, callers_policy
from distributed_state.programs.service.authentication import Authentication
from distributed_state.programs.service.requests import Operation
from distributed_state.values import access_tokens

HI = {"role": "user", "content": "hi"}
OPERATIONS = {f"{each.method} {each.path}": each for each in Service().operations}
BODIES: dict[str, Any] = {
    "Create": {"id": "new"}, "Turn": {"messages": [HI]}, "Append": {"messages": [HI]}, "Patch": {"set": {"n": 1}},
    "SetField": {"value": 1}, "Retag": {"tag": {"a": ["b"]}}, "MakeCheckpoint": {"label": "here"},
    "Rollback": {"version": 1}, "Fork": {"id": "fork"}, "Take": {"wait": 0}, "Renew": {}, "Search": {"query": "hi"},
    "Replace": {"messages": [HI]}, "WholeWrite": {"set": {"n": 1}}, "FieldChange": {"key": "n", "add": 1},
    "Compact": {}, "Purge": {"keep_changes": 1000}, "ChangeItems": {"put": {"1": 1}}, "Live": {"idle": 60},
    "MakeToken": {"rights": ["read"]}, "Stream": {"first": 1, "chunks": [{"value": "a"}]}, "Stop": {"wait": 0},
    "Post": {"message": HI}, "Reply": {"value": "yes"}, "Wake": {"after": 60},
}  # fmt: skip
QUERIES = {"Other": "?to=1"}


def path_of(operation: Operation, id: str) -> str:
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: {"id": id}.get(found[1], "1"), operation.path)
    return path + QUERIES.get(operation.query.__name__ if operation.query else "", "")


def body_of(operation: Operation, id: str) -> dict[str, Any]:
    if operation.body is None:
        return {}
    body = BODIES[operation.body.__name__]
    return {"json": body | {"id": f"{id}-{body['id']}"} if "id" in body else body}


class Served:
    """A service in this process, asked without a socket, and its tokens."""

    def __init__(self, store: AsyncStateStore, access: Access, **options: Any) -> None:
        self.store = store
        self.service = Service(authentication=Authentication(access), **options)
        self.service.begin(store)
        transport = httpx.ASGITransport(self.service.app, client=("10.1.2.3", 5000))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def token(self, prefix: str, *rights: str, actor: str = "web", seconds: float | None = 3600.0) -> str:
        id, text = access_tokens.make()
        tiers = self.store._lifecycle.tiers()
        tokens = tiers.cold.access_tokens
        await tiers.port.sql(
            lambda: tokens.add(
                id, access_tokens.digest(text), prefix=prefix, rights=rights, actor=actor, seconds=seconds
            )
        )
        return text

    async def revoke(self, text: str) -> None:
        tiers = self.store._lifecycle.tiers()
        await tiers.port.sql(tiers.cold.access_tokens.revoke, access_tokens.id_of(text))

    async def ask(self, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.http.request(method, path, headers=headers, **options)


def opened(**options: Any) -> AsyncStateStore:
    return AsyncStateStore.open(archive="memory", access=callers_policy(), **options)
