"""Refusals of a service as errors. Law: what the direct store raises, with the same fields, and nothing milder.

Design: section 26.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distributed_state import errors
from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    ConfigurationError,
    Conflict,
    Deleted,
    DurabilityUnknown,
    InvalidTransition,
    StateError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from distributed_state.port.http import HttpAnswer

_PROBLEM = "application/problem+json"
LATER = frozenset({429, 502, 503, 504})
"""The same request may be answered after a while."""
_AWAY = LATER - {429}


def refusal(answer: HttpAnswer) -> StateError:
    """The error that a refused request raises."""
    problem = _problem(answer)
    text = str(problem.get("detail") or f"the service answered {answer.status}")[:2000]
    kind = getattr(errors, str(problem.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, StateError):
        make = _WITH_FIELDS.get(kind)
        return kind(text) if make is None else make(text, problem)
    if 300 <= answer.status < 400:
        # Followed it would take the token to wherever it points.
        return ConfigurationError("the service answers from another URL; give that one")
    if answer.status == 401:
        return Unauthenticated(text)
    if answer.status == 403:
        return AccessDenied(text)
    if answer.status == 413:
        return TooLarge(text)
    if answer.status in LATER:
        return Unavailable(text)
    if answer.status in (404, 405):
        # Never NotFound: a path that nobody serves says nothing about a record.
        return ConfigurationError(f"{text}: this URL, or this release of the service, does not serve that")
    return StateError(text)


def _problem(answer: HttpAnswer) -> dict[str, Any]:
    if answer.headers.get("content-type", "").partition(";")[0].strip() != _PROBLEM:
        return {}
    try:
        found = json.loads(answer.body)
    except ValueError:
        return {}
    if not isinstance(found, dict) or found.get("detail") in ("Not Found", "Method Not Allowed"):
        return {}  # of a path that is not served
    return found


def _whole(problem: dict[str, Any], name: str) -> int:
    found = problem.get(name)
    return found if type(found) is int else 0


_WITH_FIELDS: dict[type[StateError], Callable[[str, dict[str, Any]], StateError]] = {
    Conflict: lambda text, problem: Conflict(text, version=_whole(problem, "version")),
    Deleted: lambda text, problem: Deleted(text, version=_whole(problem, "version")),
    DurabilityUnknown: lambda text, problem: DurabilityUnknown(text, version=_whole(problem, "version")),
    InvalidTransition: lambda text, problem: InvalidTransition(
        text, phase=str(problem.get("phase") or ""), event=str(problem.get("event") or "")
    ),
}


def may_come_later(answer: HttpAnswer, error: StateError, *, repeatable: bool) -> bool:
    """Whether to ask again. What may have been applied is repeated only where that is applied once."""
    if answer.status == 429 or isinstance(error, Backpressure):
        return True  # nothing was written
    return repeatable and answer.status in _AWAY and not isinstance(error, DurabilityUnknown)
