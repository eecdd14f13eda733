"""Parsing of requests. Law: all input is validated before the store is used, and none is read without a limit."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from distributed_state.errors import InvalidValue
from distributed_state.programs.service import bodies
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.paths import ROUTE, UNREADABLE
from distributed_state.values import path_names
from distributed_state.values.model import escape

B = TypeVar("B", bound=BaseModel)
_BODY = "distributed_state.body"  # in the scope of a request
_ID = "distributed_state.request_id"
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,200}")
_SCOPES = {"conversations": "session", "users": "user", "tasks": "task"}  # by the first word of a path
_SHOWN = 3  # faults of one request that its answer names


def body(request: Request, limits: Limits, model: type[B]) -> B:
    """The body, a JSON object as `model` has it; an empty one counts as {}."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Other types, and none, a web page can send to any server without asking it first.
        raise HTTPException(415, f"a body is application/json, not {kind[:80] or 'without a Content-Type'}")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        # What is a few kilobytes compressed may be gigabytes.
        raise HTTPException(415, f"a body is sent as it is, not as {coding[:80]!r}")
    data: bytes = request.state.body
    try:
        # Not orjson: it reads large integers as floats, and a value must come back as it was sent. Of nothing but
        # UTF-8, as its shape was looked at in that.
        given = json.loads(data.decode()) if data else {}
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(given, dict):
        raise InvalidValue(f"the body is a JSON object, not {_kind(given)}")
    bodies.bound(given, limits)
    request.scope[_BODY] = given
    return _checked(model, given, "the body")


def query(request: Request, model: type[B]) -> B:
    """Read the query as `model` has it: what is a list there may stand several times."""
    given: dict[str, Any] = {}
    for name, value in pairs(request):
        field = model.model_fields.get(name)
        if field is not None and "list[" in str(field.annotation):
            given.setdefault(name, []).append(value)
        else:
            given[name] = value
    return _checked(model, given, "the query")


def pairs(request: Request) -> list[tuple[str, str]]:
    """The query as it was sent. Raises InvalidValue for one that is no UTF-8: two texts would be read as one."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        found = parse_qsl(text, keep_blank_values=True, errors="surrogatepass")
        return [(name, path_names.checked(value)) for name, value in found]
    except UnicodeDecodeError as error:
        raise InvalidValue("the query is not UTF-8 where its % are decoded") from error


def _checked(model: type[B], given: dict[str, Any], what: str) -> B:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        said = []
        for fault in faults[:_SHOWN]:
            place = ".".join(map(str, fault["loc"]))
            if fault["type"] == "extra_forbidden":
                said.append(f"{what} has {', '.join(model.model_fields) or 'nothing'}, not {place!r:.80}")
            else:
                text = fault["msg"].removeprefix("Value error, ")
                said.append(f"{place[:80]}: {text[:1].lower()}{text[1:200]}" if place else text[:200])
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise InvalidValue("; ".join(said) + more) from error


def digest(request: Request, *others: str) -> str:
    """Identify a request to a record: a hash of its method, path, query and body, however they are written.

    The record's own id is left out: a fork has the answers of its source, and a request that comes again there is the
    same. `others` are the ids of other records that the request is about.
    """
    given = request.scope.get(_BODY, {})
    try:
        text = orjson.dumps(given, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Large integers and lone surrogates.
        text = json.dumps(given, sort_keys=True).encode()
    asked = request.scope
    given_names = [str(each) for name, each in request.path_params.items() if name != "id"]
    names = "\n".join(map(escape, [*others, *given_names]))
    head = f"{request.method} {asked[ROUTE]}\n{names}\n".encode() + asked["query_string"] + b"\n"
    return hashlib.sha256(head + text).hexdigest()[:32]


def check_path(request: Request) -> None:
    """Raise InvalidValue for a path in which a name cannot be read."""
    if request.scope[UNREADABLE]:
        raise InvalidValue(request.scope[UNREADABLE])


def path_of(request: Request) -> str:
    """The path as it was asked for, to be put into an answer."""
    raw: bytes | None = request.scope.get("raw_path")
    return quote(request.scope["path"]) if raw is None else quote(raw, safe="/%:@!$&'()*+,;=")


def request_id(request: Request) -> str:
    """The request's id: its X-Request-Id if that is printable, else one that is made here."""
    found = request.scope.get(_ID)
    if found is None:
        given = request.headers.get("x-request-id", "")
        found = request.scope[_ID] = given if _PRINTABLE.fullmatch(given) else secrets.token_hex(16)
    return str(found)


def record_of(request: Request) -> str | None:
    """The record that the path names, as logs have it: session:c1."""
    id = request.path_params.get("id")
    kind = request.scope[ROUTE].split("/")[2]
    scope = _SCOPES.get(kind)
    return None if scope is None or id is None else f"{scope}:{escape(id[:200])}"


def header(request: Request, name: str) -> str:
    """A header as UTF-8 text, all lines of it; "" if it was not sent. Raises InvalidValue for one that is no UTF-8."""
    try:
        return ", ".join(request.headers.getlist(name)).encode("latin-1").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name} is not UTF-8") from error


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")
