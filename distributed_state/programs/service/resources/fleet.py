"""Who serves: the replicas of the store. Law: it is for operators, who have the right `admin`."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources.shapes import Answer, Values
from distributed_state.programs.service.routes import Asked


class Replicas(Answer):
    """The replicas that are there."""

    replicas: list[Values]


async def replicas(asked: Asked) -> Response:
    """The replicas of the store."""
    return answer({"replicas": [asdict(each) for each in await asked.store.replicas()]})
