"""The worker as an ASGI application. Law: every request has a time limit, and every error gets an answer.

Every request takes the same path: guard (caller, rights, room in the worker), parse, engine, answer.

The answer repeats the request's `X-Request-Id`, or gets a new one, and the access log shows it. It cannot serve as an
`Idempotency-Key`, because proxies generate another one for each attempt. The actor in the history comes from `X-Actor`,
which the proxy that authenticates users sets.

An abandoned request is cleaned up after its answer: a cancelled turn releases its lease, which takes a while if Redis
does not answer. Operators and load balancers ask a worker whether it can serve. Each server gets at most one small
probe a second, independent of the number of questions. A scrape of metrics waits for these probes, which have a time
limit, so that it shows whether the worker is ready now; everything else it reads in this process.

Design: sections 24, 27.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distributed_state.errors import AccessDenied, InvalidValue, StateError, Unavailable, WarmUnavailable
from distributed_state.port import Port, waited
from distributed_state.programs import logs
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import (
    EventQuery,
    EventStream,
    OutputStream,
    PaidResponse,
    Positions,
    Stream,
    answer,
    compress,
    refusal,
)
from distributed_state.programs.service.authentication import CALLER, Authentication, Caller, KnownHosts, serving
from distributed_state.programs.service.limits import Budget, Growing, Limits, Quota, Rates, Shares, Sizes
from distributed_state.programs.service.operations import Described, operations
from distributed_state.programs.service.requests import (
    LAST_EVENT_ID,
    PREFIX,
    READ,
    REQUEST_ID,
    SENT,
    Asked,
    NamedRoute,
    Operation,
    in_line,
)
from distributed_state.programs.service.resources import output, records
from distributed_state.records.context import context_of
from distributed_state.results import Event
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.lifecycle import lifecycle_of
from distributed_state.store.metrics import collector, process
from distributed_state.values.keys import Keys

T = TypeVar("T")
log = logging.getLogger(__name__)
_NOT_USABLE = "cannot be used now; see the log"
_NO_TOKENS = "this worker knows no valid token, and SQL, which has them, does not answer"
NEEDS = ("redis,sql", "redis")
"""The values of `need` in /readyz that metrics report: that without a query, and that of a fleet which outlives SQL."""
_PREFIX = "distributed_state_http"
_OTHERS = "others"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


# Readiness


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """One probe for each server of a store."""
    tiers = lifecycle_of(store).tiers()
    return {
        "redis": Probe("redis", lambda: any_server(tiers.port, tiers.keys), seconds),
        "sql": Probe("sql", lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }


async def any_server(port: Port, keys: Keys) -> None:
    """Check that at least one server of a cluster accepts writes. Raises the first server's error if none does.

    If one unavailable server made the probe fail, the worker would not serve the records on the other servers.

    PING is not enough: a replica, a full server, and a server that denies this user its rights all answer it. `SET XX`
    of a key that never exists writes nothing, and is refused whenever a commit would be.
    """
    owned: dict[str, bytes] = {}
    for partition in range(keys.partitions):
        key = keys.probe(partition)
        owned.setdefault(port.node_of(key), key)
    asked = [asyncio.ensure_future(port.command_with(node, b"SET", key, b"", b"XX")) for node, key in owned.items()]
    errors = list[StateError]()
    try:
        for each in asyncio.as_completed(asked):
            try:
                await each
                return
            except StateError as error:
                errors.append(error)
        raise errors[0]
    finally:
        for command in asked:
            command.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class Probe:
    """A probe of one server, with a cached result. While a probe hangs, no second one is started."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[Any]], seconds: float) -> None:
        self._name = name
        self._ask = ask
        self._seconds = seconds
        self._running: asyncio.Task[str] | None = None
        self._result = self._logged = ""
        self._until = 0.0

    async def problem(self) -> str:
        """Why the server is not usable, "" if it is."""
        if time.monotonic() >= self._until:
            if self._running is None:
                self._running = asyncio.create_task(self._probed())
            running = self._running
            await asyncio.wait((running,), timeout=self._seconds)
            if running.done():
                self._result = running.result()
                self._running = None
            else:
                self._result = f"no answer within {self._seconds:g} s"
            self._until = time.monotonic() + self._seconds
            self._log()
        return self._result

    def _log(self) -> None:
        """Log a new result once, as /readyz may not show it to its callers."""
        if self._result != self._logged:
            self._logged = self._result
            if self._result:
                log.warning("not ready: %s: %s", self._name, self._result)

    async def _probed(self) -> str:
        try:
            await self._ask()
        except StateError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Cancel the running probe."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))


class Readiness:
    """Whether a worker can serve: whether its servers answer, and whether it can check the callers' tokens."""

    def __init__(self, probes: Mapping[str, Probe], authentication: Authentication) -> None:
        self._probes = probes
        self._authentication = authentication

    async def problems(self, need: str) -> dict[str, str]:
        """The needed servers, each with the reason why it is not usable, or ""; also `tokens` if none can be checked.

        Raises InvalidValue for a server that does not exist.
        """
        try:
            asked = {name: self._probes[name].problem for name in need.split(",")}
        except KeyError as error:
            raise InvalidValue(f"need lists redis and sql, not {error.args[0]!r:.40}") from None
        found = dict(zip(asked, await asyncio.gather(*(ask() for ask in asked.values())), strict=True))
        if self._authentication.needs_sql and await self._probes["sql"].problem():
            found["tokens"] = _NO_TOKENS
        return found

    async def close(self) -> None:
        """Cancel the running probes."""
        for probe in self._probes.values():
            await probe.close()


async def ready(request: Request, readiness: Readiness, *, public: bool) -> Response:
    """Answer GET /readyz, or ?need=redis. If `public`, leave out the servers' messages, as they name addresses."""
    try:
        found = await readiness.problems(request.query_params.get("need", NEEDS[0]))
    except InvalidValue as error:
        return refusal(error, request)
    said = {name: (_NOT_USABLE if public else problem) if problem else "answers" for name, problem in found.items()}
    if any(found.values()):
        return answer({"status": "not ready", **said}, 503, headers={"Retry-After": "1"})
    return answer({"status": "ready", **said})


# Metrics, for Prometheus


class Measures:
    """The metrics of requests: how many were answered, run now or read events, and whether the worker serves."""

    def __init__(
        self, *, running: Callable[[], float], streams: Callable[[], float], outputs: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self._most = 0  # maximum number of tenants with separate counters
        process(self.registry)
        self._requests = Counter(
            f"{_PREFIX}_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            f"{_PREFIX}_request_seconds", "Seconds until the answer was sent.", ["method", "route"],
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        for name, text, read in (
            ("requests_running", "Requests in progress.", running),
            ("event_streams", "Open event streams.", streams),
            ("output_streams", "Open streams of the output of turns.", outputs),
        ):
            Gauge(f"{_PREFIX}_{name}", text, registry=self.registry).set_function(read)
        self._ready = Gauge(
            f"{_PREFIX}_ready", "Whether /readyz?need=... answers 200 at this scrape: 1 or 0.", ["need"],
            registry=self.registry,
        )  # fmt: skip
        for need in NEEDS:
            self._ready.labels(need)

    def by_tenant(self, most: int) -> None:
        """Also count by tenant from now on: the first `most` tenants, and all others as one."""
        self._named, self._most = set[str](), most
        text, labels = "by tenant; tenants beyond the maximum number of labels count as 'others'.", ["tenant"]
        prefix = "distributed_state_tenant"
        self._of_tenant = Counter(
            f"{prefix}_requests", f"Requests answered, {text}", [*labels, "status"], registry=self.registry
        )
        self._bytes = Counter(
            f"{prefix}_bytes", f"Bytes of request bodies and answers, {text}", labels, registry=self.registry
        )

    def of_tenant(self, tenant: str, status: int, size: int) -> None:
        """Count one request of a tenant; `size` is the bytes of its body and its answer."""
        if not self._most:
            return
        if tenant not in self._named:
            if len(self._named) >= self._most:
                tenant = _OTHERS
            else:
                self._named.add(tenant)
        self._of_tenant.labels(tenant, status).inc()
        self._bytes.labels(tenant).inc(size)

    def begin(self, store: Collector) -> None:
        """Also show the metrics of a store from now on."""
        self.registry.register(store)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request and its time."""
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def shown(self, ready: Mapping[str, bool]) -> Response:
        """All metrics in the format of Prometheus; `ready` says for each of `NEEDS` whether the worker serves now."""
        for need, serves in ready.items():
            self._ready.labels(need).set(serves)
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


# Requests that run


class Work:
    """The requests that are running or being cleaned up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._end: float | None = None  # when all requests must have ended

    def __len__(self) -> int:
        return len(self._waiting)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result. Raises Unavailable after `seconds`, or when `finish` abandons it."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        over = loop.create_future()
        self._tasks.add(task)
        self._waiting.add(over)
        task.add_done_callback(partial(self._done, over))
        end = loop.time() + seconds
        timer = loop.call_at(end if self._end is None else min(end, self._end), _settle, over)
        try:
            await over
        finally:
            timer.cancel()
            self._waiting.discard(over)
            if not task.done():
                task.cancel()
        if not task.done():
            raise Unavailable(
                f"abandoned after {seconds:g} s or because the worker stops; a turn with a request_id may be repeated"
            )
        try:
            return task.result()
        finally:
            # An exception refers to this frame: if the frame kept `task`, all data of the request would stay in memory
            # until the next garbage collection.
            del task

    def _done(self, over: asyncio.Future[None], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _settle(over)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the client may already have its answer

    async def finish(self, seconds: float) -> None:
        """Wait at most this long for all requests, including those that begin meanwhile; then abandon the rest."""
        self._end = asyncio.get_running_loop().time() + seconds
        await self._ended(seconds)
        for over in list(self._waiting):
            _settle(over)
        await self._ended(_CLEANING_UP)

    async def _ended(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        # A loop, because requests may begin meanwhile, which would otherwise be abandoned although time is left.
        while self._tasks and (left := end - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


log_of_requests = logging.getLogger("distributed_state.service.access")
_LARGE = 16 * 1024  # bytes from which on an answer is compressed, if its client accepts gzip
_RECOGNIZED_FOR = 2.0  # seconds after which the caller of a stream of events is checked again
_TAKEN = "taken"  # in the state of a request: the bytes that it has taken from the budget
_CLEANING_UP = 2.0  # seconds to clean up an abandoned request
_JOINING = 4  # streams at once: each asks SQL and Redis for the position of every partition


class Service:
    """One store, served over HTTP. Call `begin` once the store is open; `leave`, `drain`, `close` before it closes."""

    def __init__(
        self,
        limits: Limits | None = None,
        authentication: Authentication | None = None,
        *,
        ops_apart: bool = False,
        origins: tuple[str, ...] = (),
        more: Sequence[Operation] = (),
    ) -> None:
        # `origins`: web pages whose scripts may call the service, such as "https://app.example.com"; none by default.
        # `more`: additional operations, which the OpenAPI description leaves out
        self.limits = limits or Limits()
        self.authentication = authentication or Authentication()
        self.store: AsyncStateStore | None = None
        self.draining = False
        self.awaited = "Redis and SQL"
        """The servers that the worker waits for before it serves; shown to clients."""
        self._readiness: Readiness | None = None
        self._work = Work()
        self.budget = Budget(self.limits.in_flight, self.limits.room)
        """The bytes held by requests, answers and streams."""
        self._sizes = Sizes(self.limits.in_flight // 8)
        self._places = Shares(self.limits.requests, "requests")
        self._hearers = Shares(self.limits.streams, "event streams")
        self._followers = Shares(self.limits.followers, "output streams")
        self._joining = asyncio.Semaphore(_JOINING)
        self._rates = Rates(self.limits)
        self._quota = Quota(self.limits)
        self._streams: dict[Stream, tuple[Caller, Shares, asyncio.Task[None]]] = {}
        self.measures = Measures(
            running=lambda: len(self._work),
            streams=lambda: len(self._hearers),
            outputs=lambda: len(self._followers),
        )
        if self.limits.tenant_metrics:
            self.measures.by_tenant(self.limits.tenant_metrics)
        self.operations = operations(self._events, self._follow, self._own_events)
        self._described = Described(self.operations)
        self._more = more
        self.app = Starlette(
            routes=[*self._routes(), *([] if ops_apart else self._ops())],
            exception_handlers={HTTPException: self._unrouted},
            middleware=[
                Middleware(KnownHosts, hosts=self.authentication.hosts, refuse=self._unrouted),
                *(cors(origins) if origins else []),
            ],
        )
        self.ops = Starlette(routes=self._ops(), exception_handlers={HTTPException: self._unrouted})
        for each in (self.app, self.ops):
            each.router.redirect_slashes = False  # a redirect would lead to a host that the client names, without TLS

    def _routes(self) -> list[Route]:
        by_path: dict[str, dict[str, Operation]] = {}
        for each in (*self.operations, *self._more):
            by_path.setdefault(each.path, {})[each.method] = each
        return [
            *(
                NamedRoute(path, partial(self._serve, by_method), methods=[*by_method], start=PREFIX)
                for path, by_method in by_path.items()
            ),
            Route(f"{PREFIX}/openapi.json", self._openapi),
        ]

    def _ops(self) -> list[Route]:
        """Routes for operators; the application has them too, unless they have their own port."""
        return [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
        ]

    # Lifecycle

    def begin(self, store: AsyncStateStore) -> None:
        """Serve this store from now on. Before that, every answer except that of /healthz is 503."""
        self.authentication.begin(store)
        self._readiness = Readiness(probes(store, self.limits.check), self.authentication)
        self.measures.begin(collector(store))
        logs.opened(store.replica)
        self.store = store

    def wait_for(self, server: str) -> None:
        """Note the server that the worker waits for; answers name it until the worker serves."""
        self.awaited = f"{server}, which does not answer"

    async def leave(self) -> None:
        """Fail /readyz, so that load balancers stop sending requests, and continue to serve for a moment."""
        self.draining = True
        if self.store is not None:
            await asyncio.sleep(self.limits.notice)

    async def drain(self) -> None:
        """End the event streams, and wait for the running requests. Later requests get the time that is left."""
        for stream in [*self._streams]:
            stream.end()
        await self._work.finish(self.limits.drain)

    async def close(self) -> None:
        """Close probes and authentication. Call it after the last request was answered."""
        await self.authentication.close()
        if self._readiness is not None:
            await self._readiness.close()
        if self.store is not None:
            logs.closed(self.store.replica)

    # Requests

    async def _serve(self, by_method: Mapping[str, Operation], request: Request) -> Response:
        operation = by_method["GET" if request.method == "HEAD" else request.method]
        began = time.perf_counter()
        about = requests.record_of(request)
        # Set in the context of the request's own task; tasks that it starts inherit it.
        logs.REQUEST_ID.set(requests.request_id(request))
        logs.RECORD.set(about)
        try:
            with waited.call() as account:  # counts the time in which this request waits for Redis
                try:
                    response = await self._served(operation, request, about)
                except WarmUnavailable:
                    waited.unanswered(account)
                    raise
        except Exception as error:  # noqa: BLE001 - an error is answered, and logged if it is unexpected
            response = refusal(error, request)
            self._give_back(request)
        except BaseException:
            self._give_back(request)
            raise
        if (caller := getattr(request.state, "caller", None)) is not None:
            size = len(response.body)
            response.headers.update(self._rates.answered(caller, size))
            size += len(getattr(request.state, "body", b""))
            self.measures.of_tenant(caller.tenant, response.status_code, size)
        took = time.perf_counter() - began
        self.measures.answered(request.method, operation.path, response.status_code, took)
        try:
            response = await self._sent(request, response, took)
        except BaseException:
            self._give_back(request)
            raise
        taken = getattr(request.state, _TAKEN, None)
        if taken is None:
            return response
        if taken.size != len(response.body):
            taken.become(len(response.body))  # it was compressed
        return PaidResponse(response, taken)

    @staticmethod
    def _give_back(request: Request) -> None:
        if (taken := getattr(request.state, _TAKEN, None)) is not None:
            taken.give_back()

    async def _served(self, operation: Operation, request: Request, about: str | None) -> Response:
        if self.store is None:
            raise HTTPException(503, f"this worker is starting: it is waiting for {self.awaited}")
        caller = request.state.caller = await self._caller(operation, request)
        self._rates.ask(caller)
        if operation.right is not None and operation.right not in caller.rights:
            raise AccessDenied(f"{caller.actor!r:.80} has no right to {operation.right}")
        requests.check_head(request, operation)
        parsed = await requests.receive_body(request, self.limits)
        self._rates.count(caller, len(request.state.body))
        with self._places.one(caller):
            asked = Asked(self.store, self.limits, caller, request, self._quota, self._rates, self.budget)
            if operation.right in ("read", None):
                return await self._read(operation, asked, about, parsed)
            # The answer to a write is small.
            taken = request.state.taken = await self.budget.take(caller.party, parsed)
            response = await self._work.within(self.limits.request, _done(operation, asked))
            taken.become(len(response.body))
            return response

    async def _read(self, operation: Operation, asked: Asked, about: str | None, parsed: int) -> Response:
        """Make an answer that may be large, after taking room for it."""
        request, caller, limits = asked.request, asked.caller, self.limits
        kind = (operation.path, request.path_params.get("id", ""), caller.tenant, *operation.kind(request))
        copies = operation.copies
        if copies is None:
            # Records in the hot tier are counted there, so only the answer itself is counted here.
            copies = 1 if about in lifecycle_of(asked.store).tiers().hot.entries else 3
        taken = request.state.taken = await self._sizes.take(self.budget, caller.party, kind, parsed, copies)
        with waited.making_room(Growing(self.budget, taken, parsed, copies, limits.answer)):
            response = await self._work.within(limits.request, _done(operation, asked))
        size = len(response.body)
        taken.become(size)
        self._sizes.note(kind, size)
        if operation.right is not None and size > limits.answer:
            # Stored values are bounded, but may be longer as JSON.
            raise InvalidValue(f"the answer is {size} bytes, more than {limits.answer}: ask for less")
        return response

    async def _sent(self, request: Request, response: Response, took: float) -> Response:
        id = requests.request_id(request)
        response.headers[REQUEST_ID] = id
        if "content-encoding" not in response.headers and len(response.body) >= _LARGE:
            response.headers["Vary"] = "Accept-Encoding"
            if requests.accepts_gzip(request):
                await compress(response)
        if self.draining:
            response.headers["Connection"] = "close"  # the next request goes to another worker
        if log_of_requests.isEnabledFor(logging.INFO):
            client = self.authentication.proxies.client(request)
            line = {
                "time": round(time.time(), 3), "client": client, "method": request.method,
                "path": request.scope["path"], "status": response.status_code, "ms": round(took * 1000, 2),
                "request_id": id,
            }  # fmt: skip
            log_of_requests.info(json.dumps(line))
        return response

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        return await self._sent(request, refusal(error, request), 0.0)

    async def _caller(self, operation: Operation, request: Request) -> Caller:
        if operation.tickets and "ticket" in request.query_params and self.store is not None:
            return await output.admit(self.store, self.authentication, request)
        return await self.authentication.caller(request)

    async def _events(self, asked: Asked, given: EventQuery) -> Response:
        """Open an event stream: `types=conversation.*&since=`; the header Last-Event-ID overrides `since`."""
        return await self._open_events(asked, given, asked.caller.hears)

    async def _own_events(self, asked: Asked, given: EventQuery) -> Response:
        """Open a stream of the events of one conversation."""
        context = context_of(records.handle(asked, "session"))
        context.allow("read", None)
        return await self._open_events(asked, given, lambda event: event.subject == context.text)

    async def _follow(self, asked: Asked, given: output.Follow) -> Response:
        """Open a stream of the output of a conversation's turns."""
        if (refused := self._no_stream(asked)) is not None:
            return refused
        messages = output.UiMessages(given) if given.format == "ai-sdk" else None
        stream = OutputStream(
            output.followed(asked, given),
            messages or output.Events(given),
            asked.limits,
            self._forget,
            partial(self._rates.count, asked.caller),
            self.budget.stream(),
        )
        if messages is not None:
            stream.headers.update(messages.HEADERS)
        await self._opened(stream, asked, self._followers)
        if stream.over or output.is_known(stream.waiting, asked, given):
            self._forget(stream)
            stream.end()
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        return stream

    def _no_stream(self, asked: Asked) -> Response | None:
        if self.draining:
            raise Unavailable("this worker is stopping")
        if asked.request.method == "HEAD":
            # The answer to HEAD ends with its head. Otherwise another client's request, which a proxy sends next on
            # this connection, would wait forever for the stream to end.
            return Response(media_type=Stream.media_type)
        return None

    async def _open_events(self, asked: Asked, given: EventQuery, hears: Callable[[Event], bool]) -> Response:
        if (refused := self._no_stream(asked)) is not None:
            return refused
        types = [each for several in given.types for each in several.split(",") if each]
        positions = Positions(lifecycle_of(asked.store).tiers().archive_id, asked.caller.prefix)
        since = positions.open(requests.header(asked.request, LAST_EVENT_ID) or given.since or "") or None
        with serving(None):  # the stream itself leaves out events that its caller may not receive
            events = asked.store.events(*types, since=since)
        buffered = self.budget.stream()
        events.count_in(buffered)
        count = partial(self._rates.count, asked.caller)
        stream = EventStream(events, asked.limits, self._forget, hears, count, positions.seal, buffered)
        await self._opened(stream, asked, self._hearers, self._joining)
        return stream

    async def _opened(self, stream: Stream, asked: Asked, places: Shares, *lines: asyncio.Semaphore) -> None:
        places.take(asked.caller)
        watching = asyncio.create_task(self._end_when_refused(stream, asked))
        self._streams[stream] = asked.caller, places, watching
        try:
            async with in_line(*lines):
                await stream.join()
        except BaseException:
            self._forget(stream)
            raise

    async def _end_when_refused(self, stream: Stream, asked: Asked) -> None:
        """End a stream once its caller's token is revoked or has expired: the stream checked it only at its start."""
        caller = asked.caller
        with contextlib.suppress(StateError, HTTPException):
            while caller == asked.caller:
                await asyncio.sleep(_RECOGNIZED_FOR)
                if "ticket" in asked.request.query_params:
                    await self.authentication.still(caller)
                else:
                    caller = await self.authentication.caller(asked.request)
        stream.end()

    def _forget(self, stream: Stream) -> None:
        known = self._streams.pop(stream, None)
        if known is not None:
            caller, places, watching = known
            stream.buffered.give_back()
            places.leave(caller)
            watching.cancel()

    # The description

    async def _openapi(self, request: Request) -> Response:
        return await self._sent(request, await self._described.openapi(request), 0.0)

    # The worker itself

    async def _healthz(self, request: Request) -> Response:
        return answer({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        """GET /readyz, or ?need=redis for a fleet that serves data in Redis while SQL is unavailable."""
        if self._readiness is None or self.draining:
            return answer({"status": "draining" if self.draining else "starting"}, 503)
        public = self.authentication.known and request.app is self.app
        return await ready(request, self._readiness, public=public)

    async def _serves(self, need: str) -> bool:
        """Whether /readyz with this `need` answers 200."""
        if self._readiness is None or self.draining:
            return False
        return not any((await self._readiness.problems(need)).values())

    async def _metrics(self, request: Request) -> Response:
        """GET /metrics. With authentication, on the service's own port, only for admins of all tenants."""
        try:
            if self.authentication.known and request.app is self.app:
                caller = await self.authentication.caller(request)
                if caller.prefix or "admin" not in caller.rights:
                    raise AccessDenied(f"{caller.actor!r:.80} may not read metrics")
            return self.measures.shown({need: await self._serves(need) for need in NEEDS})
        except StateError as error:
            return refusal(error, request)


async def _done(operation: Operation, asked: Asked) -> Response:
    """Parse the request and answer it. It runs in its own task, so the context set here ends with that task."""
    CALLER.set(asked.caller)
    given = requests.parsed(asked.request, operation, asked.limits)
    with asked.store.acting_as(asked.caller.actor) if asked.caller.actor else contextlib.nullcontext():
        return await operation.serve(asked, *given)


def cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Let the scripts of these pages call the service. The browser never sends its credentials along."""
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=READ, expose_headers=SENT, max_age=600,
        )
    ]  # fmt: skip
