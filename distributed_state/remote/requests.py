"""Requests to a service: its address and token, refusals as errors, locks, and the URL of a record.

Law: a request ends within its time limit, and a write is applied once.

A write carries an Idempotency-Key, so it can be sent again, also to another worker, when its reply was lost. A write
without a key is sent again only if it certainly did not arrive. A refusal raises the error that the direct store would
raise, with the same fields. Only writes inside `with lock()` carry the lease. The token is never part of a message or a
log of this package, and is sent only over TLS.

Design: section 26.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlencode, urlsplit
from weakref import ref

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from distributed_state import errors
from distributed_state.errors import (
    AccessDenied,
    Backpressure,
    ConfigurationError,
    Conflict,
    Deleted,
    DurabilityUnknown,
    InvalidTransition,
    InvalidValue,
    Locked,
    LockTimeout,
    NotFound,
    StateError,
    Stopped,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UsageExceeded,
)
from distributed_state.port import bodies, retrying
from distributed_state.port.bodies import Body, leaving
from distributed_state.port.http import Http, HttpAnswer, HttpLines, HttpPlace, Unanswered
from distributed_state.remote import values
from distributed_state.settings import require_host
from distributed_state.values import as_text, chance
from distributed_state.values.model import Ref

_PROBLEM = "application/problem+json"
LATER = frozenset({429, 502, 503, 504})
"""The statuses after which the same request may succeed later."""
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
        # Following a redirect would send the token to its target.
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
        # Not NotFound: a 404 for a path that the service does not have says nothing about a record.
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
        return {}  # the answer for an unknown path
    return found


def _whole(problem: dict[str, Any], name: str) -> int:
    found = problem.get(name)
    return found if type(found) is int else 0


def _time(found: Any) -> float | None:
    return float(found) if type(found) in (int, float) else None


_WITH_FIELDS: dict[type[StateError], Callable[[str, dict[str, Any]], StateError]] = {
    Conflict: lambda text, problem: Conflict(text, version=_whole(problem, "version")),
    Deleted: lambda text, problem: Deleted(
        text,
        version=_whole(problem, "version"),
        expired=_time(problem.get("expired")),
        begins_again=problem.get("begins_again") is True,
    ),
    DurabilityUnknown: lambda text, problem: DurabilityUnknown(text, version=_whole(problem, "version")),
    Stopped: lambda text, problem: Stopped(
        text, reason=None if problem.get("reason") is None else str(problem["reason"])
    ),
    UsageExceeded: lambda text, problem: UsageExceeded(
        text, tokens=_whole(problem, "tokens"), limit=_whole(problem, "limit")
    ),
    InvalidTransition: lambda text, problem: InvalidTransition(
        text, phase=str(problem.get("phase") or ""), event=str(problem.get("event") or "")
    ),
}


def may_come_later(answer: HttpAnswer, error: StateError, *, repeatable: bool) -> bool:
    """Whether to repeat a request. One that may have been applied is repeated only if the service applies it once."""
    if answer.status == 429 or isinstance(error, Backpressure):
        return True  # nothing was written
    return repeatable and answer.status in _AWAY and not isinstance(error, DurabilityUnknown)


_TOKEN = re.compile(r"[\x21-\x7e]{1,8192}")
URL, TOKEN, TOKEN_FILE = (f"DISTRIBUTED_STATE_{name}" for name in ("URL", "TOKEN", "TOKEN_FILE"))


def address(url: str | None, token: str | None = None) -> HttpPlace:
    """The address of a service, from the argument or the environment, and the headers for all requests.

    Raises ConfigurationError for an invalid URL, or one that must not receive a token.
    """
    url = os.environ.get(URL, "") if url is None else url
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except (ValueError, AttributeError) as error:
        raise ConfigurationError("url: cannot be read; an example is https://state.example.com") from error
    if parts.scheme not in ("http", "https"):
        raise ConfigurationError("url: a remote store has an http:// or https:// one")
    if not host:
        raise ConfigurationError("url: names no host; an example is https://state.example.com")
    require_host(host, "url")
    if "@" in parts.netloc:
        raise ConfigurationError("url: holds a user or password; give the token as token=")
    if parts.query or parts.fragment:
        raise ConfigurationError("url: ends before ? and #; an example is https://state.example.com")
    found = _token(token)
    if found is not None and parts.scheme == "http" and _public(host):
        raise ConfigurationError(f"url: a token is sent to {host} only over https://")
    headers = {"Accept": "application/json", "User-Agent": "distributed-state"}
    if found is not None:
        headers["Authorization"] = f"Bearer {found}"
    return HttpPlace(url.rstrip("/"), headers)


def _public(host: str) -> bool:
    """Whether this host is certainly outside this machine and private networks; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def _token(given: str | None) -> str | None:
    found = given
    if found is None and TOKEN in os.environ:
        found = os.environ[TOKEN].strip()
    elif found is None and TOKEN_FILE in os.environ:
        name = os.environ[TOKEN_FILE]
        try:
            found = Path(name).read_text().strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{TOKEN_FILE}: {name!r:.200} cannot be read: {type(error).__name__}") from error
    if found is not None and (not isinstance(found, str) or _TOKEN.fullmatch(found) is None):
        raise ConfigurationError("token: is one word of printable ASCII characters")
    return found


KEY = "Idempotency-Key"
_PAUSE = wait_random_exponential(multiplier=0.05, max=2.0)


class _AskAgain(Exception):
    """The request may be repeated, after `after` seconds if the service gave a time; `error` is the reason."""

    def __init__(self, error: StateError, after: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


class Requests:
    """One service, with answers decoded from JSON.

    A failed request is repeated for `retry_for` seconds; a request waits `timeout` seconds for its answer.
    """

    def __init__(self, http: Http, *, retry_for: float, timeout: float) -> None:
        self.http = http
        self.retry_for = retry_for
        self.timeout = timeout

    async def read(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """Send a read, which may be repeated freely."""
        return await self._ask("GET", with_query(path, query), {}, None, True)

    async def write(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Any:
        """Send a write, which is applied once even if it is sent several times."""
        key = f"c-{chance.token_hex(16)}"
        return await self._ask(method, path, {**(headers or {}), KEY: key}, body, True)

    async def order(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        wait: float = 0.0,
    ) -> Any:
        """Send a request without a key; `wait` seconds are added to its time limit."""
        return await self._ask(method, path, dict(headers or {}), body, repeatable, wait)

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Any, repeatable: bool, wait: float = 0.0
    ) -> Any:
        data = None if body is None else encoded(body)
        sent = {**headers, "Content-Type": "application/json"} if data is not None else headers
        again = AsyncRetrying(
            retry=retry_if_exception_type(_AskAgain),
            stop=stop_before_delay(self.retry_for),
            wait=_pause,
            sleep=self.http.sleep,
            reraise=True,
        )
        try:
            return await again(self._once, method, path, sent, data, repeatable, self.timeout + wait)
        except _AskAgain as last:
            error = last.error
        raise error

    async def _once(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes | None, repeatable: bool, timeout: float
    ) -> Any:
        try:
            answer = await self.http.send(method, path, headers, data, timeout)
        except Unanswered as lost:
            if not repeatable and lost.sent:
                raise Unavailable(f"{lost}; the request may or may not have been applied") from lost
            raise _AskAgain(Unavailable(f"the service did not answer: {lost}"), 0.0) from lost
        if answer.status < 300:
            return _said(answer)
        error = refusal(answer)
        if may_come_later(answer, error, repeatable=repeatable):
            raise _AskAgain(error, _seconds(answer.headers.get("retry-after", "")))
        raise error


def _pause(state: RetryCallState) -> float:
    """The pause before the next attempt: the service's, else longer each time."""
    error = None if state.outcome is None else state.outcome.exception()
    asked = error.after if isinstance(error, _AskAgain) else 0.0
    # Spread out the clients that got the same answer.
    return max(float(_PAUSE(state)), asked + asked * 0.1 * chance.source.random())


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


def _said(answer: HttpAnswer) -> Any:
    """A decoded body. orjson is not used, because it reads large integers as floats."""
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise Unavailable("the service's answer is not JSON") from error


def encoded(body: Any) -> bytes:
    """Encode a body as JSON. Values were checked before; a name that JSON would change raises InvalidValue."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        as_text.checked(text)
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def with_query(path: str, query: Mapping[str, Any] | None) -> str:
    """The path with all values that are not None as its query; a list becomes several parameters."""
    pairs = []
    for name, value in (query or {}).items():
        if isinstance(value, list):
            pairs += [(name, each) for each in value]
        elif value is not None:
            pairs.append((name, str(value).lower() if isinstance(value, bool) else value))
    return f"{path}?{urlencode(pairs, errors='surrogatepass')}" if pairs else path


_SILENT = 45.0  # seconds: a worker sends data every 15 s, so the connection is dead after this time
_RECONNECTING = 0.2  # seconds before another attempt
_EVENT_STREAM = {"Accept": "text/event-stream"}


class EventSource:
    """Server-sent events of a path, one connection after the other, each from the last position on.

    `finite`: the service ends the stream, and answers 204 when nothing follows. Source: the WHATWG HTML standard,
    "Server-sent events".
    """

    def __init__(self, requests: Requests, path: str, position: str, *, finite: bool = False) -> None:
        self.position = position
        """The position after the last event, as the service names it."""
        self.closed = False
        self._requests = requests
        self._path = path
        self._finite = finite
        self._lines: HttpLines | None = None
        self._joined = False
        self._fields: dict[str, str] = {}
        self._failing: float | None = None  # the time since which all attempts to connect failed

    async def next(self, timeout: float | None) -> dict[str, str] | None:
        """The fields of the next block; None if none ended within this time, or if the connection ended."""
        clock = self._requests.http.monotonic
        end = None if timeout is None else clock() + timeout
        while not self.closed:
            line = await self._line(_SILENT if end is None else min(_SILENT, max(0.0, end - clock())))
            if line is None:
                return None
            name, _, text = line.partition(":")
            if line:
                self._fields[name] = text.removeprefix(" ")
                continue
            self._joined = True
            found, self._fields = self._fields, {}
            self.position = found.get("id", self.position)
            return found
        return None

    async def _line(self, seconds: float) -> str | None:
        """The next line; None if none came within this time, or if the connection ended."""
        http = self._requests.http
        if self._lines is None:
            # The time counts from the start of the attempt, not from its failure: an attempt to reach a silent service
            # takes long.
            self._failing = http.monotonic() if self._failing is None else self._failing
            headers = {"Last-Event-ID": self.position} if self.position else {}
            self._lines = http.lines(self._path, headers | _EVENT_STREAM, _SILENT)
        try:
            line = await self._lines.line(seconds)
        except TimeoutError:
            return None
        except Unanswered as error:
            await self._broken(Unavailable(f"the service did not answer: {error}"))
            return None
        if isinstance(line, HttpAnswer) and self._finite and line.status == 204:
            await self.close()
            return None
        if isinstance(line, HttpAnswer):
            await self._broken(refusal(line), again=line.status in LATER)
            return None
        self._failing = None
        if line is None:
            await self._pause()
        return line

    async def _broken(self, error: StateError, *, again: bool = True) -> None:
        """Reconnect after a pause, unless attempts have failed for too long or cannot succeed."""
        since = self._failing
        late = since is not None and self._requests.http.monotonic() - since >= self._requests.retry_for
        if not self.closed and (late or not again):
            await self._leave()
            raise error
        await self._pause()

    async def _pause(self) -> None:
        await self._leave()
        await self._requests.http.sleep(_RECONNECTING)

    async def _leave(self) -> None:
        lines, self._lines, self._fields = self._lines, None, {}
        if lines is not None:
            await lines.close()

    async def join(self) -> None:
        """Start the stream: all later events are received."""
        clock = self._requests.http.monotonic
        end = clock() + self._requests.timeout
        while not self._joined and not self.closed:
            if await self.next(max(0.0, end - clock())) is None and clock() > end:
                raise Unavailable("the service did not begin to send events")

    async def close(self) -> None:
        """End the stream."""
        self.closed = True
        await self._leave()


# The leases of the running task or thread, by service and path of the record. Tasks started inside inherit this.
# References are weak, because the context must not keep a dropped lease alive.
_Found = Callable[[], "AsyncRemoteLease | None"]
_held: ContextVar[Mapping[tuple[int, str], _Found]] = ContextVar("distributed_state_remote_leases")
_ONCE = 5.0  # seconds that one request waits for a lease: less than the service's limit for a request
HEADER = "Lease"


def carried(requests: Requests, path: str) -> dict[str, str]:
    """The header for a write of this record: the lease that is held here, if there is one."""
    lease = _holder(requests, path)
    return {} if lease is None or not lease.lease else {HEADER: lease.lease}


def _holder(requests: Requests, path: str) -> AsyncRemoteLease | None:
    """The lease of a record that is held here, unless its body has ended and was interrupted before the release."""
    found = _held.get({}).get((id(requests), path))
    lease = found() if found is not None else None
    return lease if lease is not None and lease.body.there else None


def _others(mine: AsyncRemoteLease) -> dict[tuple[int, str], _Found]:
    """The other leases held in this context, without interrupted ones, which would otherwise stay in it forever."""
    found = ((name, each, each()) for name, each in _held.get({}).items())
    return {name: each for name, each, lease in found if lease not in (None, mine) and lease.body.there}


async def _give_back(requests: Requests, path: str, lease: str, query: Mapping[str, Any] | None = None) -> None:
    # A lease that cannot be released ends after its ttl. An error here would replace that of the body.
    with suppress(StateError):
        await requests.order("DELETE", with_query(path + "/lease", query), headers={HEADER: lease}, repeatable=True)


class AsyncRemoteLease:
    """A locked record, from `record.lock()`.

    Example::

        async with record.lock(wait=5.0) as lease:
            await record.set("seat", "12A")
    """

    def __init__(
        self, requests: Requests, path: str, *, wait: float, ttl: float, turn: Mapping[str, Any] | None = None
    ) -> None:
        self._requests = requests
        self._path = path
        self._wait = wait
        self._ttl = ttl
        self._turn = turn or {}
        self._ends: dict[str, Any] = {}
        self._stop: Callable[[], None] | None = None
        self._outer: AsyncRemoteLease | None = None
        self.lease = ""
        self.owner: object = None
        self.body = Body()
        self._token = 0
        self._lost = self._released = False

    @property
    def token(self) -> int:
        """The fencing token; a later holder's is greater."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether the lease is known to have ended; writes under it then raise Fenced."""
        return self._lost or (self._outer is not None and self._outer.lost)

    async def renew(self) -> bool:
        """Extend the lease by its `ttl` seconds; return False if it has ended. The background work does this too.

        A nested lease renews the outer one, by the outer one's `ttl`.
        """
        if self._outer is not None:
            return await self._outer.renew()
        try:
            await self._requests.order(
                "PUT", self._path + "/lease", {"ttl": self._ttl}, headers={HEADER: self.lease}, repeatable=True
            )
        except Unavailable:
            return True  # unknown: the next renewal or write finds out
        except StateError:
            self._lost = True
            return False
        return True

    async def acquire(self) -> Self:
        """Take the lease, or raise LockTimeout after `wait` seconds. If this task holds it already, it nests."""
        outer = _holder(self._requests, self._path)
        # A task started inside the body writes under the lease, but a lock that it takes does not nest in it.
        nests = outer is not None and outer.owner == bodies.owner()
        self._outer = outer if nests else None
        if self._outer is not None:
            if self._outer is self:
                raise Locked("this task already holds this lease")
            self.lease, self._token = self._outer.lease, self._outer.token
            return self
        self.body.begin()
        try:
            found = await self._taken()
            self._lost = self._released = False
            self.lease = found["lease"]
            self._token = found["token"]
            self.owner = bodies.owner()
            self._stop = self._requests.http.every(self._ttl / 3, self._renewing())
            _held.set({**_others(self), (id(self._requests), self._path): ref(self)})
        except BaseException:
            self.body.leave()  # also after a call by hand, because its caller did not get the lease
            raise
        return self

    def wanted(self) -> bool:
        """Whether the lease still has a holder; otherwise it is lost, unless it was released."""
        if self._released:
            return False
        if not self.body.held_by(self.owner):
            self._lost = True
        return not self._lost

    def _renewing(self) -> Callable[[], Coroutine[Any, Any, bool]]:
        """The background renewal, which does not keep the object alive; it returns False once renewal may end."""
        me, held = ref(self), (self._requests, self._path, self.lease)

        async def renew() -> bool:
            lease = me()
            if lease is not None and lease.wanted():
                return await lease.renew()
            await _give_back(*held)
            return False

        return renew

    async def _taken(self) -> Any:
        clock = self._requests.http.monotonic
        end = clock() + self._wait
        while True:
            wait = max(0.0, min(_ONCE, end - clock()))
            try:
                body = {"wait": wait, "ttl": self._ttl, **self._turn}
                return await self._requests.order("POST", self._path + "/lease", body, wait=wait)
            except Locked as error:
                if clock() >= end:
                    raise LockTimeout(f"{error}; waited {self._wait:g} s") from error

    def ends_output(self, streamed: int, *, failed: bool) -> None:
        """Let the release end the output of the turn, which has streamed this many chunks."""
        self._ends = {"streamed": streamed, "failed": failed} if streamed else {}

    async def release(self) -> None:
        """Release the lease. Has no effect on a lost lease, which another holder may have now."""
        if self._stop is None:  # the lease nests, or is not held
            return
        self.body.leave_by_hand()  # tasks started under the lease no longer write under it
        self._released = True
        stop, self._stop = self._stop, None
        self.owner = None  # breaks the cycle of a task whose error refers to this lease
        _held.set(_others(self))
        await _give_back(self._requests, self._path, self.lease, self._ends)
        stop()  # last: if the release is interrupted, the background work completes it

    async def __aenter__(self) -> Self:
        return await self.acquire()

    @leaving("body")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


T = TypeVar("T")
_KINDS = {"session": "conversations", "user": "users", "task": "tasks"}
_ATTEMPTS = 50
_PAGE = 500


@dataclass(frozen=True, slots=True)
class State:
    """A record that was read: version 0 if it does not exist. One that was deleted has no fields, but its refusal."""

    version: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    phase: str | None = None
    deleted: Deleted | None = None


class RecordPlace:
    """The place of a record behind a service, and the owner that it gets if it is created."""

    def __init__(self, requests: Requests, ref: Ref, user: str | None = None) -> None:
        self.requests = requests
        self.ref = ref
        self.user = None if user is None else Ref("user", user).id
        self.path = path_of(ref)

    async def read(self, path: str, query: Mapping[str, Any] | None = None, *, absent: Any) -> Any:
        """The service's answer below the record; `absent` if the record, or that part of it, does not exist."""
        try:
            return await self.requests.read(path, query)
        except (NotFound, Deleted):
            return absent

    async def pages(
        self, what: str, query: dict[str, Any], most: int | None, by: str, *, order: str = "asc", at: str = ""
    ) -> list[Any]:
        """The first `most` rows in this order, from several pages; `by` names the number at which a page continues.

        One request for each 500 rows, or fewer if they are large. `at` is the path below the record, by default the
        rows' name.
        """
        found: list[Any] = []
        largest = _PAGE
        query = {**query, "order": "desc" if order == "desc" else None}
        while most is None or len(found) < most:
            size = largest if most is None else min(largest, most - len(found))
            try:
                page = await self.requests.read(f"{self.path}/{at or what}", query | {"limit": size})
            except InvalidValue:
                if size == 1:
                    raise
                largest = size // 2  # together the rows exceed the size of one answer
                continue
            found += page[what]
            if len(page[what]) < size:
                break
            query["before" if order == "desc" else "after"] = page[what][-1][by]
        return found

    async def state(self, *, fresh: bool = False) -> State:
        """Read the whole record."""
        query: dict[str, Any] = {"fresh": fresh or None}
        if self.ref.scope == "session":
            query["last"] = 0
        try:
            said = await self.requests.read(self.path, query)
        except NotFound:
            return State()
        except Deleted as error:
            return State(error.version, deleted=error)
        return State(said["version"], values.shown(said), said.get("phase"))

    async def write(
        self,
        given: Mapping[str, Any],
        durability: str | None = None,
        *,
        expect_version: int | None = None,
        expect_exists: bool | None = None,
        to: str = "/writes",
        method: str = "POST",
        owned: bool = True,
        lease: AsyncRemoteLease | None = None,
    ) -> Any:
        """Make one commit, and return the service's answer. A `request_id` in the body is its Idempotency-Key.

        The commit is made under `lease`, by default the lease that is held here.
        """
        headers = values.conditions(expect_version, expect_exists)
        headers |= self.carried() if lease is None else {HEADER: lease.lease}
        more = {"user": self.user if owned else None, "durability": durability}
        sent = {**given, **{name: each for name, each in more.items() if each is not None}}
        free = not headers.keys() & {"If-Match", "If-None-Match"} and not any(
            each.startswith("expect") for each in sent
        )

        async def once() -> Any:
            body = None if method == "DELETE" else sent
            if "request_id" in sent:
                return await self.requests.order(method, self.path + to, body, headers=headers, repeatable=True)
            return await self.requests.write(method, self.path + to, body, headers=headers)

        # If other writers were faster at each of the service's attempts, the conflict has their version, and a retry
        # may succeed. Without a version the conflict is about an item, or a field that is not a number, and a retry has
        # the same result.
        return await (self.until_no_conflict(once, lambda conflict: conflict.version > 0) if free else once())

    async def until_no_conflict(
        self, once: Callable[[], Awaitable[T]], passing: Callable[[Conflict], bool] = lambda _: True
    ) -> T:
        """Retry while other writers are faster, and raise Conflict in the end.

        A Conflict that is not `passing` is raised at once.
        """
        return await retrying.until_no_conflict(once, _ATTEMPTS, self.requests.http.sleep, passing=passing)

    async def order(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a request without a key, under the lease that is held here."""
        return await self.requests.order(method, self.path + path, body, headers=self.carried(), **options)

    def carried(self) -> dict[str, str]:
        """The header for a write: the lease that is held here."""
        return carried(self.requests, self.path)


def path_of(ref: Ref, form: str = "", *names: str) -> str:
    """The path of a record or of a part of it: `form` is like "/fields/{}", with a {} for each name."""
    return as_text.path("/v1", f"/{kind_of(ref.scope)}/{{}}{form}", ref.id, *names)


def kind_of(scope: str) -> str:
    """The service's name for records of a scope. Raises ConfigurationError for a scope that it does not have."""
    if scope not in _KINDS:
        raise ConfigurationError(f"{scope}: a remote store has sessions, users and tasks; use a direct store")
    return _KINDS[scope]
