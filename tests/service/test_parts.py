"""Parts of `distributed-state serve` that need no server."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from distributed_state import errors
from distributed_state.errors import DurabilityUnknown, StateError
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs import service
from distributed_state.programs.cli import shell
from distributed_state.programs.service.answers import PUBLIC, STATUS, encode, refusal
from distributed_state.programs.service.resources.records import not_modified
from distributed_state.values.codec import Codec

pytestmark = pytest.mark.unit

ALL = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StateError)),
    key=lambda each: each.__name__,
)
EXPECTED = {
    "Unauthenticated": 401, "NotPermitted": 503, "ConfigurationError": 501,
    "AccessDenied": 403, "NotFound": 404, "Conflict": 409, "InvalidTransition": 409, "Interrupted": 409,
    "Stopped": 409, "UsageExceeded": 409,
    "Deleted": 410, "TooLarge": 413, "InvalidValue": 422, "Locked": 423, "LockTimeout": 423, "Backpressure": 503,
    "Fenced": 503, "Unavailable": 503, "WarmUnavailable": 503, "ColdUnavailable": 503,
    "UnknownOperation": 503, "RecoveryInProgress": 503, "DurabilityUnknown": 503,
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[StateError]) -> None:
    response = refusal(kind("what was asked"))
    assert response.status_code == EXPECTED.get(kind.__name__, 500)
    body = json.loads(bytes(response.body))
    assert body["error"] == kind.__name__
    assert body["detail"]
    assert ("what was asked" in body["detail"]) is issubclass(kind, PUBLIC)
    assert (response.headers.get("retry-after") == "1") == (response.status_code in (423, 429, 503))
    assert STATUS.keys() <= set(ALL)


def test_a_turn_whose_end_is_unknown_may_be_repeated_by_its_request_id_and_else_is_to_be_read_first() -> None:
    for request_id, said in (
        ("r", "the turn is applied"),
        (None, "the write may have been applied: read the record before"),
    ):
        response = refusal(DurabilityUnknown("applied", version=3, request_id=request_id))
        assert (response.status_code, response.headers.get("retry-after")) == (503, "1")
        assert json.loads(bytes(response.body))["detail"].startswith(said)


def test_what_went_wrong_inside_is_told_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = refusal(ValueError("a secret"))
    assert response.status_code == 500
    assert b"secret" not in response.body
    assert "a secret" in caplog.text


def test_a_header_of_any_kind_is_read_at_once() -> None:
    entry = CachedRecord(Codec("", ""), "1", 7, {}, {})

    def known(given: str) -> bool:
        scope = {"type": "http", "headers": [(b"if-none-match", given.encode())]}
        return not_modified(Request(scope), entry) is not None

    began = time.perf_counter()
    assert not any(map(known, (f"a{' ' * 16_000}a", '"' * 16_001, '"7 , 7"', "7", "")))
    assert time.perf_counter() - began < 1, "with the spaces around a tag in its pattern, it took five seconds"
    assert all(map(known, ('"7"', 'W/"7"', '"3", W/"7"', '"3","7"', "*")))


@pytest.mark.parametrize("value", [{"a": [1, None]}, 10**30, "\udc80", {"n": 0.1 + 0.2}, {"deep": [[{}]]}])
def test_what_is_written_is_read_back(value: object) -> None:
    assert json.loads(encode(value)) == value


def test_the_command_serves_with_the_limits_that_a_program_would(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(service, "serve", lambda _, **options: given.update(options))
    assert CliRunner().invoke(shell.app, ["serve"]).exit_code == 0
    assert given["limits"] == service.Limits()
    assert given["access"] == service.Access()
