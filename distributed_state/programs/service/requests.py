"""Parses requests, defines the types of bodies and answers, and shares the event loop between requests.

Law: all input is checked before the store is used, every read has a limit, and an operation names the right that it
needs.

A path is split before each of its names is decoded, once, so the id that is compared with a caller's prefix is the one
that is read or written. A request takes a place only when its whole body has arrived. The body's shape is checked
before it is parsed: a parser makes an object of some 70 bytes from each `[]`, and a recursive parser stops the loop on
deep nesting.

Unknown names in a body are refused. Users' values are neither copied nor converted here, and only the store checks
them, so that a large integer or an odd string comes back as it was sent. The description of the interface is made from
the same types.

The event loop runs all ready tasks before it reads from sockets. Thirty large answers of 40 ms each would delay
/healthz by all of them; made one at a time (`in_turn`), they delay it by 40 ms.

Design: sections 23, 24.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_type_hints
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode
from weakref import WeakKeyDictionary, WeakValueDictionary

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from starlette.convertors import Convertor, PathConvertor, StringConvertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from distributed_state.errors import InvalidValue, TooLarge, Unavailable
from distributed_state.port import waited
from distributed_state.programs.service import limits
from distributed_state.programs.service.authentication import Caller
from distributed_state.programs.service.limits import Budget, Limits, Quota, Rates
from distributed_state.results import TurnTimes
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values import as_text
from distributed_state.values.access_tokens import Right
from distributed_state.values.model import ABSENT, PRESENT, escape

T = TypeVar("T")
_ROUNDS = 10  # of the loop: a new connection is accepted, read and answered in six
_LARGE = 64 * 1024  # bytes from which on reading or writing JSON takes long
_COPIES = 2  # copies of whole records at once
_SEARCHES = 2  # searches of one party at once
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_copying: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
# Values are weak: a lock exists as long as a task holds it or waits for it.
_copies: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
_searches: WeakValueDictionary[tuple[int, str], asyncio.Semaphore] = WeakValueDictionary()


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """Do work on `size` bytes of JSON. Large work runs one at a time in this event loop."""
    if size < _LARGE:
        return work()
    async with turn():
        return work()


@asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """Do long work inside the block, one at a time in this event loop."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        yield
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)


@asynccontextmanager
async def in_line(*places: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Hold all of these inside the block. Waiting for them counts as the request's waiting for Redis."""
    async with AsyncExitStack() as stack:
        with waited.queued():
            for each in places:
                await stack.enter_async_context(each)
        yield


@asynccontextmanager
async def copying(party: str) -> AsyncIterator[None]:
    """Copy a whole record inside the block: a few at a time, and one of each party, so that a party delays only itself.

    A request of ten bytes may read and write a whole large record.
    """
    loop = asyncio.get_running_loop()
    own = _copies.setdefault((id(loop), party), asyncio.Lock())
    async with in_line(own, _copying.setdefault(loop, asyncio.Semaphore(_COPIES))):
        try:
            yield
        finally:
            limits.trim_memory()


@asynccontextmanager
async def searching(party: str) -> AsyncIterator[None]:
    """Search inside the block: a few at a time for each party, so that SQL and its threads stay free for others.

    A request of fifty bytes may search thousands of documents.
    """
    own = _searches.setdefault((id(asyncio.get_running_loop()), party), asyncio.Semaphore(_SEARCHES))
    async with in_line(own):
        yield


PREFIX = "/v1"
Serve = Callable[..., Coroutine[Any, Any, Response]]
"""Answers a request. Its arguments are an Asked, and the body or query if the operation has one."""

IF_MATCH = "If-Match"
IF_NONE_MATCH = "If-None-Match"
IDEMPOTENCY_KEY = "Idempotency-Key"
LEASE = "Lease"
LAST_EVENT_ID = "Last-Event-ID"
SESSION = "X-Session-Id"
REQUEST_ID = "X-Request-Id"
CONDITIONS = (IF_MATCH, IF_NONE_MATCH, IDEMPOTENCY_KEY, LEASE)
"""Headers that change the meaning of a request.

An operation refuses requests with a header that it does not support."""
READ = (
    *("Authorization", "Content-Type", REQUEST_ID, LAST_EVENT_ID, SESSION, *CONDITIONS),
    *("Mcp-Session-Id", "Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name"),
)
"""Headers of a request that a web page may send. X-Actor is not among them: the authenticating proxy sets it."""
SENT = (
    *("ETag", "Link", "Location", REQUEST_ID, "Retry-After", "RateLimit", "RateLimit-Policy", "WWW-Authenticate"),
    "Mcp-Session-Id",
)
"""Headers of answers that carry information besides the body; web pages may read them."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path: `path` as Starlette writes it.

    `answer` is the type of the answer with `status`, and `media` its media type; `headers` are those of CONDITIONS that
    it takes. The annotation of `serve` says whether it takes a `body` or a `query` besides the request. Without a
    `right`, `serve` checks rights itself.

    A GET with `tickets` also takes the query parameter `ticket` in place of a token.

    `copies` is the number of copies of an answer in memory while it is made. Answers of one path, record and `kind`
    have about the same size.
    """

    method: str
    path: str
    right: Right | None
    serve: Serve
    summary: str = ""
    answer: type[BaseModel] | None = None
    status: int = 200
    headers: tuple[str, ...] = ()
    media: str = "application/json"
    copies: int | None = None
    tickets: bool = False
    kind: Callable[[Request], tuple[str, ...]] = lambda _: ()
    query: type[Query] | None = field(init=False)
    body: type[Body] | None = field(init=False)

    def __post_init__(self) -> None:
        function = self.serve.func if isinstance(self.serve, partial) else self.serve
        given = get_type_hints(function).get("given")
        object.__setattr__(self, "body", given if given is not None and issubclass(given, Body) else None)
        object.__setattr__(self, "query", given if given is not None and issubclass(given, Query) else None)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and all that is needed to answer it."""

    store: AsyncStateStore
    limits: Limits
    caller: Caller
    request: Request
    quota: Quota
    rates: Rates
    budget: Budget


# Types of bodies, queries and answers


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Run(Body):
    """One run of a tool, or one call of a model, and the seconds that it took."""

    kind: Literal["tool", "model"]
    name: str = Field(min_length=1, max_length=200)
    seconds: float = Field(ge=0, le=1e9)


class Query(BaseModel):
    """The query string of a request; its texts are converted to the fields' types."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """The content of an answer, for the description only: answers are not validated before they are sent."""

    model_config = ConfigDict(extra="forbid")


def _is_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("is an object")
    return value


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("is a text")
    return value


def _is_id(value: Any) -> Any:
    if not 1 <= len(_is_text(value)) <= _LONGEST:
        raise ValueError(f"has 1 to {_LONGEST} characters")
    return value


def _are_messages(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("is a list of messages as {'role': 'user', 'content': 'hi'}")
    return value


_VALUES = {"type": "object", "additionalProperties": True}
_ENCODED = {"type": "object", "additionalProperties": {"type": "string", "contentEncoding": "base64"}}
_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "additionalProperties": True}

Values = Annotated[dict[str, Any], PlainValidator(_is_object), WithJsonSchema(_VALUES)]
"""JSON values by name."""
Encoded = Annotated[dict[str, Any], PlainValidator(_is_object), WithJsonSchema(_ENCODED)]
"""Bytes by name, in base64. They have an object of their own, as JSON cannot hold bytes."""
Messages = Annotated[
    list[dict[str, Any]], PlainValidator(_are_messages), WithJsonSchema({"type": "array", "items": _MESSAGE})
]
"""Messages in the fields of the chat format; unknown ones are kept."""
_LONGEST = 1024
Id = Annotated[str, PlainValidator(_is_id), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _LONGEST})]
Name = Annotated[str, PlainValidator(_is_text), WithJsonSchema({"type": "string"})]
"""Any name that the store takes, also with lone surrogates, which pydantic's own str type refuses."""
Span = Annotated[float, Field(ge=0.001, le=3e9)]
"""Seconds that a conversation may live."""
Ttl = Annotated[float, Field(gt=0, le=1e9)]
"""Seconds until a field expires."""
Label = Annotated[str, Field(min_length=1, max_length=500)]
Texts = dict[Name, list[Name]]
Version = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(ge=1, le=1000)]


class Versioned(Answer):
    """The version that this request made."""

    version: int


class Begun(Answer):
    """A record that began."""

    id: str
    version: int


class Written(Answer):
    """The new version; `repeated` if a request with this Idempotency-Key was answered before."""

    version: int
    repeated: bool


def value_shown(value: Any) -> dict[str, Any]:
    """One value as an answer has it."""
    return {"bytes": as_text.text_of(value)} if isinstance(value, bytes) else {"value": value}


def expected(expect: Values | None, absent: list[str], present: list[str]) -> dict[str, Any]:
    """The expected values of fields before a write. Raises InvalidValue."""
    found = dict(expect or {})
    for names, word in (absent, ABSENT), (present, PRESENT):
        for name in names:
            if name in found:
                raise InvalidValue(f"{name!r:.80}: only one condition is allowed for it")
            found[name] = word
    return found


def together(given: dict[str, Any] | None, encoded: dict[str, Any] | None) -> dict[str, Any]:
    """Values and bytes as the store takes them. Raises InvalidValue."""
    return as_text.together(given or {}, encoded) if encoded else dict(given or {})


class Times(Answer):
    """Where the time of a turn went, in seconds: `total` until its commit was sent, `commit` for the commit itself.

    `lock` is the wait for the lease, `read` the reads from Redis and SQL, `elsewhere` the unmeasured rest. `runs` are
    the 12 slowest of its tools and models; `more` others took `more_seconds` together. `commit` is null in a history.
    """

    total: float
    lock: float
    read: float
    elsewhere: float
    runs: list[Run]
    more: int
    more_seconds: float
    commit: float | None


def times_shown(times: TurnTimes | None) -> dict[str, Any] | None:
    """The times of a turn as they are answered."""
    return None if times is None else asdict(times)


B = TypeVar("B", bound=BaseModel)

# In the scope of a request
ROUTE = "distributed_state.route"
"""The path of its route, such as "/v1/users/{id}"."""
UNREADABLE = "distributed_state.unreadable"
"""Why a name in its path cannot be read, "" if all are readable."""
_PARTS = "distributed_state.parts"
_BODY = "distributed_state.body"
_ID = "distributed_state.request_id"

_NONE: tuple[Match, Scope] = (Match.NONE, {})
_NAME = re.compile(r"{(\w+)(?::\w+)?}")  # a part of a path that is a name
_SCOPES = {"conversations": "session", "users": "user", "tasks": "task"}  # by the first word of a path
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,200}")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHER = bytes(set(range(256)) - set(b"[]{}"))
A_VALUE = 100  # bytes that a parsed value takes besides its text, an approximate upper limit
_SHOWN = 3  # errors of one request that its answer names


# Paths


class NamedRoute(Route):
    """A route whose names are percent-encoded, or in base64url if the first part after `start` is `base64`.

    The last name may be a `path`, which takes the whole rest.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], start: str = "") -> None:
        super().__init__(path, endpoint, methods=methods)
        self._start = start.count("/")
        form = path.split("/")[1:]
        named = {at: found[1] for at, each in enumerate(form) if (found := _NAME.fullmatch(each))}
        self._size = len(form)
        self._words = [(at, each.encode()) for at, each in enumerate(form) if at not in named]
        self._names = [(at, name, self.param_convertors[name]) for at, name in named.items()]
        self._rest = bool(self._names) and isinstance(self._names[-1][2], PathConvertor)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether it serves this request, and the names of its path."""
        if scope["type"] != "http":
            return _NONE
        parts, encoded = _parts(scope, self._start)
        size = len(parts)
        # Most routes return here, so this check comes first.
        if size != self._size and not (self._rest and size > self._size):
            return _NONE
        for at, word in self._words:
            if parts[at] != word and unquote_to_bytes(parts[at]) != word:
                return _NONE
        if size > self._size:
            parts = [*parts[: self._size - 1], b"/".join(parts[self._size - 1 :])]
        found: dict[str, Any] = {}
        problem = ""
        for at, name, kind in self._names:
            try:
                if not _take(found, name, kind, parts[at], encoded):
                    return _NONE
            except ValueError:
                problem = f"{name}: not {'base64url of ' if encoded else ''}UTF-8 after percent-decoding"
        params = {**scope.get("path_params", {}), **found}
        child = {"endpoint": self.endpoint, "path_params": params, ROUTE: self.path, UNREADABLE: problem}
        served = not self.methods or scope["method"] in self.methods
        return (Match.FULL if served else Match.PARTIAL), child


def _take(found: dict[str, Any], name: str, kind: Convertor[Any], part: bytes, encoded: bool) -> bool:
    """Read a name into `found`; False if the part does not match. Raises ValueError if it cannot be read."""
    if isinstance(kind, StringConvertor | PathConvertor):
        if not part and isinstance(kind, StringConvertor):
            return False
        found[name] = as_text.read_base64(part) if encoded else as_text.read(part)
        return True
    text = as_text.read(part)
    if re.fullmatch(kind.regex, text) is None:
        return False
    found[name] = kind.convert(text)
    return True


def _parts(scope: Scope, start: int) -> tuple[list[bytes], bool]:
    """The parts of a request's path below the root, as they were sent, and whether names are in base64url."""
    root: str = scope.get("root_path", "")
    known: tuple[str, int, tuple[list[bytes], bool]] | None = scope.get(_PARTS)
    if known is None or known[0] != root or known[1] != start:
        raw: bytes | None = scope.get("raw_path")
        if raw is None:  # ASGI servers may leave it out
            raw = quote(scope["path"]).encode()
        begin, *parts = raw.split(b"/")
        # A target that does not begin with '/' names another host, or nothing.
        parts = [] if begin else parts[root.count("/") :]
        encoded = parts[start : start + 1] == [as_text.BASE64.encode()]
        if encoded:
            parts = parts[:start] + parts[start + 1 :]
        known = scope[_PARTS] = root, start, (parts, encoded)
    return known[2]


def accepts_gzip(request: Request) -> bool:
    """Whether the client accepts a compressed answer. Source: RFC 9110, section 12.5.3."""
    weights: dict[str, bool] = {}
    for each in request.headers.get("accept-encoding", "").lower().split(","):
        coding, _, weight = each.partition(";")
        weights[coding.strip()] = re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight) is None
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", False)))


def check_path(request: Request) -> None:
    """Raise InvalidValue for a path in which a name cannot be read."""
    if request.scope[UNREADABLE]:
        raise InvalidValue(request.scope[UNREADABLE])


def check_head(request: Request, operation: Operation) -> None:
    """Raise InvalidValue for an unreadable path, or for a query or a condition that the operation does not support."""
    check_path(request)
    if operation.right is not None and operation.query is None and request.scope["query_string"]:
        raise InvalidValue("this request takes no query")
    for name in CONDITIONS:
        if name in request.headers and name not in operation.headers and request.method != "GET":
            raise InvalidValue(f"this request takes no {name}")


def parsed(request: Request, operation: Operation, limits: Limits) -> tuple[BaseModel, ...]:
    """The request's body or query, parsed for the operation; () if it takes neither.

    Raises InvalidValue for a body that the operation does not take.
    """
    if operation.body is not None:
        return (body(request, limits, operation.body),)
    if operation.right is not None and request.state.body:
        raise InvalidValue("this request takes no body")
    return () if operation.query is None else (query(request, operation.query),)


def path_of(request: Request) -> str:
    """The path as the client sent it, quoted for use in an answer."""
    raw: bytes | None = request.scope.get("raw_path")
    return quote(request.scope["path"]) if raw is None else quote(raw, safe="/%:@!$&'()*+,;=")


def record_of(request: Request) -> str | None:
    """The record that the path names, as logs show it: session:c1."""
    id = request.path_params.get("id")
    kind = request.scope[ROUTE].split("/")[2]
    scope = _SCOPES.get(kind)
    return None if scope is None or id is None else f"{scope}:{escape(id[:200])}"


# Headers


def header(request: Request, name: str) -> str:
    """A header as UTF-8 text, all lines of it; "" if it was not sent. Raises InvalidValue if it is not UTF-8."""
    try:
        return ", ".join(request.headers.getlist(name)).encode("latin-1").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name} is not UTF-8") from error


def request_id(request: Request) -> str:
    """The request's id: its X-Request-Id if that is printable, else a new id."""
    found = request.scope.get(_ID)
    if found is None:
        given = request.headers.get("x-request-id", "")
        found = request.scope[_ID] = given if _PRINTABLE.fullmatch(given) else secrets.token_hex(16)
    return str(found)


# Queries


def query(request: Request, model: type[B]) -> B:
    """Parse the query as `model`; a field that is a list may occur several times."""
    given: dict[str, Any] = {}
    for name, value in pairs(request):
        field = model.model_fields.get(name)
        if field is not None and "list[" in str(field.annotation):
            given.setdefault(name, []).append(value)
        else:
            given[name] = value
    return _checked(model, given, "the query")


def pairs(request: Request) -> list[tuple[str, str]]:
    """The pairs of the query. Raises InvalidValue if it is not UTF-8: two texts would be read as one."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        found = parse_qsl(text, keep_blank_values=True, errors="surrogatepass")
        return [(name, as_text.checked(value)) for name, value in found]
    except UnicodeDecodeError as error:
        raise InvalidValue("the query is not UTF-8 after percent-decoding") from error


def next_page(request: Request, end: Any, order: str = "asc") -> dict[str, str]:
    """The Link header to the page after `end`, in this order; no header if `end` is None."""
    if end is None:
        return {}
    name = "before" if order == "desc" else "after"
    kept = [each for each in pairs(request) if each[0] != name]
    query = urlencode([*kept, (name, end)], errors="surrogatepass")
    return {"Link": f'<{path_of(request)}?{query}>; rel="next"'}


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


# Bodies


async def receive_body(request: Request, limits: Limits) -> int:
    """Read the body into `request.state.body`, and check that its shape is safe to parse as JSON.

    Returns about the most bytes that its parsed values can take, without those of its text.

    Raises TooLarge and InvalidValue, and Unavailable if the client leaves before its end.
    """
    request.state.body = data = await _bytes(request, limits.body)
    if not data:
        return 0
    found = await in_turn(len(data), lambda: count_values(data, limits.values, limits.depth))
    return found * A_VALUE


async def _bytes(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise TooLarge(f"a body of {announced:.20} bytes is more than {limit}")
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise TooLarge(f"the body is more than {limit} bytes")
            parts.append(part)
    except ClientDisconnect as error:
        raise Unavailable("the client disconnected before its request was complete") from error
    return b"".join(parts)


def count_values(data: bytes, most: int, depth: int) -> int:
    """Count about how many values a JSON text has; the result is meaningless for other texts.

    Raises InvalidValue if there are more than `most`, or if they are nested deeper than `depth`.
    """
    if data.count(b'"') > 4 * most:
        # Refused before it is split, because the parts would be too many.
        raise InvalidValue(f"the body has more than {most} values")
    # A run of backslashes begins within a string, so pairs of them are removed from its left.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    outside = b"".join(plain.split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    found = outside.count(b",") + opened + 1
    if found > most:
        raise InvalidValue(f"the body has {found} values, more than {most}")
    if opened > depth:
        brackets = outside.translate(_BRACKETS, _OTHER)
        for _ in range(depth):
            # Each round removes the innermost brackets.
            brackets = brackets.replace(b"[]", b"")
        if brackets:
            raise InvalidValue(f"the body is nested deeper than {depth}, or its brackets are not closed")
    return found


def body(request: Request, limits: Limits, model: type[B]) -> B:
    """Parse the body, a JSON object, as `model`; an empty body counts as {}."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page can send other types, or no type, to any server without a preflight request.
        raise HTTPException(415, f"a body is application/json, not {kind[:80] or 'without a Content-Type'}")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        # A few kilobytes of compressed data may become gigabytes.
        raise HTTPException(415, f"a body must not be compressed or encoded; Content-Encoding is {coding[:80]!r}")
    data: bytes = request.state.body
    try:
        # orjson is not used: it reads large integers as floats, and a value must be returned unchanged. The text must
        # be UTF-8, which the check of the shape assumes.
        given = json.loads(data.decode()) if data else {}
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(given, dict):
        raise InvalidValue(f"the body is a JSON object, not {_kind(given)}")
    check_members(given, limits)
    request.scope[_BODY] = given
    return _checked(model, given, "the body")


def check_members(given: dict[str, Any], limits: Limits) -> None:
    """Raise InvalidValue if a member of a body has more members than one request may set, or append."""
    for name, value in given.items():
        most = limits.fields if isinstance(value, dict) else limits.messages
        if isinstance(value, (dict, list)) and len(value) > most:
            raise InvalidValue(f"{name} has {len(value)} entries, more than the {most} of one request: send several")


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return names.get(type(value).__name__, "a number")


def digest(request: Request, *others: str) -> str:
    """Identify a request to a record: a hash of its method, path, query and body, in a normalized form.

    The record's own id is left out: a fork inherits the answers of its source, and a request repeated there is the same
    request. `others` are the ids of other records that the request names.
    """
    given = request.scope.get(_BODY, {})
    try:
        text = orjson.dumps(given, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # orjson refuses large integers and lone surrogates.
        text = json.dumps(given, sort_keys=True).encode()
    asked = request.scope
    given_names = [str(each) for name, each in request.path_params.items() if name != "id"]
    names = "\n".join(map(escape, [*others, *given_names]))
    head = f"{request.method} {asked[ROUTE]}\n{names}\n".encode() + asked["query_string"] + b"\n"
    return hashlib.sha256(head + text).hexdigest()[:32]
