"""The tokens that models used: in all, by model and by day. Law: the sums of the interface, and nothing computed here.

Design: section 32.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.programs.inspector.pages import Api, page, query_of

_DAYS = 31


async def usage(request: Request, api: Api) -> Response:
    """The tokens of the last days, of all users or of one."""
    user = query_of(request).get("user", "")
    wanted: dict[str, Any] = {"user": user, "since": time.time() - (_DAYS - 1) * 86_400, "fresh": "true"}
    found = (await api.get(request, "/v1/usage", wanted)).json
    models = sorted(found["models"].items(), key=lambda each: -each[1]["input_tokens"] - each[1]["output_tokens"])
    return page(request, "usage", user=user, found=found, models=models, days=sorted(found["days"].items())[::-1])
