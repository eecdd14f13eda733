"""Parts of `distributed-state serve` that need no server."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys

import pytest
from below import until

from distributed_state import errors
from distributed_state.errors import DurabilityUnknown, StateError, Unavailable, WarmUnavailable
from distributed_state.programs.service.answers import STATUS, encode, refusal
from distributed_state.programs.service.readiness import Probe
from distributed_state.programs.service.work import Work

ALL = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StateError)),
    key=lambda each: each.__name__,
)
EXPECTED = {
    "AccessDenied": 403, "NotFound": 404, "Conflict": 409, "InvalidTransition": 409, "Interrupted": 409,
    "Deleted": 410, "TooLarge": 413, "InvalidValue": 422, "Locked": 423, "LockTimeout": 423, "Backpressure": 429,
    "Fenced": 503, "Unavailable": 503, "WarmUnavailable": 503, "ColdUnavailable": 503,
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[StateError]) -> None:
    response = refusal(kind("what was asked"))
    assert response.status_code == EXPECTED.get(kind.__name__, 500)
    assert json.loads(bytes(response.body)) == {"error": kind.__name__, "message": "what was asked"}
    assert (response.headers.get("retry-after") == "1") == (response.status_code in (423, 429, 503))
    assert STATUS.keys() <= set(ALL)


def test_only_a_turn_with_a_request_id_that_is_not_complete_is_to_be_repeated() -> None:
    for request_id, status, after in ("r", 503, "1"), (None, 500, None):
        response = refusal(DurabilityUnknown("applied", version=3, request_id=request_id))
        assert (response.status_code, response.headers.get("retry-after")) == (status, after)


def test_what_went_wrong_inside_is_told_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = refusal(ValueError("a secret"))
    assert response.status_code == 500
    assert b"secret" not in response.body
    assert "a secret" in caplog.text


@pytest.mark.parametrize("value", [{"a": [1, None]}, 10**30, "\udc80", {"n": 0.1 + 0.2}, {"deep": [[{}]]}])
def test_what_is_written_is_read_back(value: object) -> None:
    assert json.loads(encode(value)) == value


async def test_a_server_is_asked_once_a_while_however_many_want_to_know() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked > 1:
            raise WarmUnavailable("away")

    probe = Probe(ask, 0.2)
    assert set(await asyncio.gather(*(probe.problem() for _ in range(20)))) == {""}
    assert asked == 1
    assert await until(probe.problem) == "away"
    assert asked == 2


async def test_a_server_that_hangs_is_not_asked_again_before_it_answered() -> None:
    asked, answer = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    probe = Probe(ask, 0.05)
    for _ in range(3):
        assert await probe.problem() == "no answer within 0.05 s"
        await asyncio.sleep(0.06)
    assert asked == 1
    answer.set()

    async def well() -> bool:
        return await probe.problem() == ""

    await until(well)
    await probe.close()


async def test_work_is_answered_in_time_and_tidied_up_behind() -> None:
    work, tidied = Work(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            tidied.set()
            raise WarmUnavailable("nobody hears this any more")

    with pytest.raises(Unavailable, match=r"abandoned after 0\.01 s"):
        await work.within(0.01, slow())
    assert (len(work), tidied.is_set()) == (0, False)
    await work.finish(1)
    assert tidied.is_set()


async def test_work_is_finished_or_given_up_at_the_end() -> None:
    work, gate = Work(), asyncio.Event()

    async def until_open() -> int:
        await gate.wait()
        return 7

    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    asyncio.get_running_loop().call_later(0.02, gate.set)
    await work.finish(5)
    assert await running == 7
    gate.clear()
    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    await work.finish(0.01)
    with pytest.raises(Unavailable):
        await running


def test_the_core_does_not_bring_what_http_needs() -> None:
    others = "{'starlette', 'uvicorn', 'prometheus_client'}"
    code = f"import sys, distributed_state, distributed_state.programs.cli; print({others} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
