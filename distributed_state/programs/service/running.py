"""A worker as a process.

Law: SIGTERM ends it with code 0 and without losing acknowledged writes; a second one ends it at once.

It listens from the start, so that its health can be probed, and serves once Redis and SQL answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from distributed_state.errors import ColdUnavailable, ConfigurationError, StateError, Unavailable
from distributed_state.programs.service.app import Service, log_of_requests
from distributed_state.programs.service.authentication import Access, Authentication
from distributed_state.programs.service.connections import BACKLOG, Connection, Connections
from distributed_state.programs.service.limits import Limits, return_large_blocks
from distributed_state.programs.service.requests import Operation
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.lifecycle import lifecycle_of

T = TypeVar("T")
log = logging.getLogger(__name__)
_OPS = 64  # connections to the port of health and metrics
_UNSENT = 64 * 1024  # bytes of an answer that the kernel buffers for its client
_ACCEPTING = 0.1  # seconds for which connecting clients are still accepted when the worker stops
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, see socket(7)
# In the language of filters (Linux, "Documentation/networking/filter.rst"): load byte 13 of the head of TCP, the flags;
# drop the packet if SYN is one of them.
_NO_SYN = b"".join(
    struct.pack("HBBI", *each) for each in ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (6, 0, 0, 0), (6, 0, 0, 2**32 - 1))
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would die of the signal instead of exiting with code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients that have already connected: closing the listeners would reset their connections."""
        for each in sockets or ():
            _refuse_more(each)
        await asyncio.sleep(_ACCEPTING)
        await super().shutdown(sockets)


def _refuse_more(listener: socket.socket) -> None:
    """Let the kernel drop the first packet of new connections, if it can; their clients retry, and are then refused."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(_NO_SYN)
    with contextlib.suppress(OSError):  # a sandbox without filters: the last connections are reset
        listener.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(_NO_SYN) // 8, ctypes.addressof(code))
        )


def serve(
    open_store: Callable[[], Awaitable[AsyncStateStore]],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    ops_host: str = "127.0.0.1",
    ops_port: int | None = None,
    wait: float = 60.0,
    limits: Limits | None = None,
    access: Access | None = None,
    access_log: bool = False,
    origins: tuple[str, ...] = (),
    more: Sequence[Operation] = (),
    mounts: Mapping[str, Callable[[ASGIApp], ASGIApp]] | None = None,
    report: Callable[[str], None] = log.info,
) -> None:
    """Serve a store over HTTP until SIGTERM or Ctrl-C. `port` 0 is any free port; `report` is called with its URL.

    `access` configures how callers are recognized; then the store must have `access=callers_policy()`. Without it only
    this machine is served, and another `host` is a ConfigurationError. With an `ops_port`, only that port has health
    and metrics. `more` are additional operations. `mounts` are additional applications by path, each made from the
    service's application.

    While Redis or SQL are unavailable at the start, opening is repeated for `wait` seconds; then Unavailable is raised.
    ConfigurationError is raised at once. Uses uvloop if it is installed. Web pages from `origins` may call it.
    """
    # Otherwise the access log would also be written if the root logger's level is `info`.
    log_of_requests.setLevel(logging.INFO if access_log else logging.WARNING)
    if access_log:
        _write_access()
    return_large_blocks()
    if "FORWARDED_ALLOW_IPS" in os.environ:
        log.warning("FORWARDED_ALLOW_IPS is ignored: name trusted proxies with trust_proxy")
    limits = limits or Limits()
    authentication = Authentication(access, strangers=limits.requests)
    service = Service(limits, authentication, ops_apart=ops_port is not None, origins=origins, more=more)
    for path, made in (mounts or {}).items():
        mount(service.app, path, made(service.app))
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=new_loop))
        listener = stack.enter_context(_listening(host, port))
        service.authentication.require_place(listener.getsockname()[0])
        places = {listener: service.app}
        if ops_port is not None:
            places[stack.enter_context(_listening(ops_host, ops_port))] = service.ops
        if not runner.run(_run(open_store, service, places, wait, report)):
            # A thread still waits for a server that does not answer, and a normal exit would wait for this thread.
            sys.stdout.flush()
            os._exit(0)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop if it is installed, or else one of asyncio."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop  # type: ignore[import-not-found,unused-ignore]  # optional: the user may install it

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    loop.set_exception_handler(_report)
    return loop


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # uvloop continues the look-up of a name after the connect that needs it has timed out, and that was reported.
    late = context.get("message") == "Future exception was never retrieved"
    if not (late and isinstance(context.get("exception"), socket.gaierror)):
        loop.default_exception_handler(context)


def mount(application: Starlette, path: str, mounted: ASGIApp) -> None:
    """Serve an application below this path, and redirect the path without its final '/' to it.

    The redirect has a path only: Starlette's own would lead to the host that the client names, without TLS.
    """

    async def below(_: Request) -> Response:
        return RedirectResponse(f"{path}/")

    application.mount(path, mounted)
    application.add_route(path, below, methods=["GET"])


async def _run(
    open_store: Callable[[], Awaitable[AsyncStateStore]],
    service: Service,
    places: dict[socket.socket, Starlette],
    wait: float,
    report: Callable[[str], None],
) -> bool:
    """Serve until it is stopped; False if the store could not be closed in time."""
    stopping = asyncio.Event()
    limits = service.limits
    store: AsyncStateStore | None = None
    closed = True
    # Each port has its own limit, so a client that takes all connections of one port does not block health and metrics.
    connections = {
        listener: Connections(limits, service.budget)
        if application is service.app
        else Connections(replace(limits, connections=_OPS))
        for listener, application in places.items()
    }
    with _stopping_on_signals(stopping):
        servers = {
            listener: Server(config_of(application, connections[listener])) for listener, application in places.items()
        }
        serving = asyncio.gather(*(server.serve(sockets=[listener]) for listener, server in servers.items()))
        watching = [asyncio.create_task(each.watch()) for each in connections.values()]
        try:
            store = await _unless(stopping, open_with_retry(open_store, wait, service.wait_for))
            if store is not None:
                service.begin(store)
                # A full garbage collection would scan everything loaded so far, and block all answers meanwhile.
                gc.collect()
                gc.freeze()
                for name, listener in zip(("serving", "health and metrics"), places, strict=False):
                    report(f"{name} on {_shown(listener)}")
                await _unless(stopping, asyncio.shield(serving))
        finally:
            if stopping.is_set():
                report("draining")
            await service.leave()
            for server in servers.values():
                server.should_exit = True
            await service.drain()
            await serving
            await service.close()
            for each in watching:
                each.cancel()
            if store is not None:
                closed = await _close(store, limits)
            if stopping.is_set():
                report("stopped")
    return closed


def config_of(application: Starlette, connections: Connections) -> uvicorn.Config:
    """Make uvicorn serve an application with our connections; their `watch` must run beside it."""
    protocol: Any = partial(Connection, connections)  # uvicorn only calls it, although its types require a class
    limits = connections.limits
    # The address of a connection stays that of the peer, which identifies proxies: see `Proxies`.
    return uvicorn.Config(
        application, http=protocol, ws="none", lifespan="off", loop="none", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=limits.idle,
        timeout_graceful_shutdown=int(limits.drain) + 5,
    )  # fmt: skip


async def open_with_retry(
    open_store: Callable[[], Awaitable[AsyncStateStore]], wait: float, held_up: Callable[[str], None]
) -> AsyncStateStore:
    """Open a store, retrying for `wait` seconds; `held_up` is called with the server that does not answer."""
    deadline = time.monotonic() + wait
    pause = 0.1
    while True:
        try:
            return await open_store()
        except Unavailable as error:
            if time.monotonic() + pause > deadline:
                raise
            log.warning("waiting: %s", error)
            held_up("SQL" if isinstance(error, ColdUnavailable) else "Redis")
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2.0)


async def _unless(stopping: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the work's result, or None if `stopping` is set before it is done."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _close(store: AsyncStateStore, limits: Limits) -> bool:
    """Close the store. False if that took too long: its leases then expire, and another worker archives."""
    if store.settings.archiver:
        try:
            async with asyncio.timeout(limits.archive):
                archiver = lifecycle_of(store).tiers().archiver  # the service's own work, for which no policy is asked
                # Only partitions with a backlog: for the others SQL, which may be down, would be asked whether Redis
                # lost them.
                await archiver.drain([each for each, waiting in (await archiver.backlog()).items() if waiting])
        except (StateError, TimeoutError) as error:
            log.warning("not everything is archived yet: %s", str(error) or f"not within {limits.archive:g} s")
    closing = asyncio.create_task(store.close())
    done, _ = await asyncio.wait((closing,), timeout=limits.close)
    if not done:
        log.warning("Redis or SQL does not answer: exiting without closing its connections")
    return bool(done)


@contextmanager
def _stopping_on_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set `stopping` at the first signal; the second ends the process at once, even if work is still running."""
    loop = asyncio.get_running_loop()

    def received(number: int, _: Any) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop up

    before = {number: signal.signal(number, received) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"{host}:{port}: {error.strerror or error}") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Otherwise the kernel buffers 4 MB for each connection, which are not counted by a limit and hide a slow
            # client.
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
            listener.bind(address)
            listener.setblocking(False)
        except OSError as error:
            raise ConfigurationError(f"{host}:{port}: {error.strerror or error}") from error
        yield listener


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_access() -> None:
    """Write the access log to stdout, one JSON object a line."""
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(logging.Formatter("%(message)s"))
    log_of_requests.addHandler(lines)
    log_of_requests.propagate = False
