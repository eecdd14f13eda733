"""The fleet: who is there, how far its work is, what somebody should look at. Law: a part that fails hides no other.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.inspector.api import Api, Refused
from distributed_state.programs.inspector.pages import page

_PARTS = ("replicas", "partitions", "findings")


async def fleet(request: Request, api: Api) -> Response:
    """Replicas, partitions and a doctor's findings."""
    replicas, partitions, findings = await asyncio.gather(*(_part(request, api, each) for each in _PARTS))
    return page(request, "fleet", replicas=replicas, partitions=partitions, findings=findings)


async def _part(request: Request, api: Api, name: str) -> dict[str, Any]:
    """The rows of one part, or why there are none."""
    try:
        return {"rows": (await api.get(request, f"/v1/{name}")).json[name], "problem": ""}
    except Refused as refused:
        if refused.status in (401, 403):
            raise
        return {"rows": [], "problem": refused.detail}
