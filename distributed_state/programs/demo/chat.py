"""A chat with agents that can be killed: a page, and two workers that answer what is posted on it.

Law: a worker may die at any moment, also both at once, and every posted message is answered. A worker is a process of
`distributed-state work` with the handler of `chat_agent.py`. The process of the command runs the service, serves the
page, and starts killed workers again. The page posts messages and follows the answers through the service, as the page
of any user would; it never calls a worker.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distributed_state import AsyncStateStore
from distributed_state.programs.demo import chat_agent
from distributed_state.programs.demo.lifecycle import place
from distributed_state.programs.servers import working_folder
from distributed_state.programs.servers.process import guard, unguard
from distributed_state.programs.service import Access, Limits, callers_policy, serve
from distributed_state.programs.service.answers import PageFiles, answer, page_headers
from distributed_state.programs.worker_processes import Message, WorkerProcess

log = logging.getLogger(__name__)
PATH = "/chat"
ID = "chat"  # of the conversation
NAMES = ("ada", "ben")
# The lease is short, so that the other worker goes on soon. A worker that is stopped gives its answer back at once.
_OPTIONS = ("--ttl", "2", "--shutdown-timeout", "0.1")
_PROGRAM = (sys.executable, "-m", "distributed_state", "work", f"{chat_agent.__name__}:opened", *_OPTIONS)
_AWAY_SECONDS = 5.0  # after which a killed worker is started again: later than its lease ends
_STOP_SECONDS = 20.0


def chat(url: str | None, port: int, pause: float, report: Callable[[str], None]) -> None:
    """Run the workers, and serve the page, until SIGTERM or Ctrl-C.

    `pause` is the time in seconds between two words of an answer. `report` is called with the link to the page.
    """
    key = secrets.token_urlsafe(32)
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder(None))
        settings, _ = stack.enter_context(place(url, None, folder))

        async def opened() -> AsyncStateStore:
            store = await AsyncStateStore.open(**settings, access=callers_policy())
            await store.session(ID).create()
            return store

        def reported(line: str) -> None:
            before, serving, own = line.partition("serving on ")
            report(f"open {own}{PATH}/#{key}" if serving and not before else line)

        # By the environment, because the URLs hold passwords.
        shared = {f"DISTRIBUTED_STATE_{name.upper()}": str(value) for name, value in settings.items()}
        shared |= {chat_agent.PAUSE: str(pause)}
        workers = [Worker(name, shared, folder / f"{name}.log") for name in NAMES]
        stack.enter_context(running(workers))
        serve(
            opened,
            port=port,
            access=Access(key=key),
            limits=Limits(notice=0.0),
            mounts={PATH: lambda _: pages(workers, key)},
            report=reported,
        )


# The workers


class Worker:
    """One worker, which is started again whenever it was killed."""

    def __init__(self, name: str, shared: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._environment = os.environ | shared | {chat_agent.NAME: name}
        self._log = log
        self._process: WorkerProcess | None = None
        self._serves = False

    def run(self, leaving: threading.Event) -> None:
        """Keep the process running until `leaving` is set, and end it then."""
        while not leaving.is_set():
            process = WorkerProcess(_PROGRAM, self._receive, log=self._log, environment=self._environment)
            self._process = process
            guard(process.pid)
            while process.running and not leaving.wait(0.1):
                pass
            expected = {-signal.SIGKILL}
            if leaving.is_set():
                expected = {0, -signal.SIGTERM, 128 + signal.SIGTERM}  # the latter two while it starts
                process.terminate()
                process.wait(_STOP_SECONDS)
            code = process.end()
            unguard(process.pid)
            if code not in expected:
                log.warning("%s ended with %s: %s", self.name, code, process.complaint())
            leaving.wait(_AWAY_SECONDS)

    def _receive(self, report: Message | None) -> None:
        self._serves = report is not None and (self._serves or report["message"] == "working")

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def shown(self) -> dict[str, Any]:
        """The worker, for the page."""
        process = self._process
        there = process is not None and process.running
        state = "dead" if not there else "serving" if self._serves else "starting"
        return {"name": self.name, "state": state, "pid": process.pid if process and there else None}


@contextmanager
def running(workers: Sequence[Worker]) -> Iterator[None]:
    """Run these workers while the block runs."""
    leaving = threading.Event()
    threads = [threading.Thread(target=each.run, args=(leaving,)) for each in workers]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        leaving.set()
        for each in threads:
            each.join()


def pages(workers: Sequence[Worker], key: str) -> Starlette:
    """The page, and what it asks this process for: the state of the workers, and to kill one."""
    found = PageFiles(files("distributed_state.programs.demo") / "page", page_headers())

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise HTTPException(401, "open the link that the command has printed")

    async def page(request: Request) -> Response:
        return found.answer("chat.html")

    async def shown(request: Request) -> Response:
        check(request)
        return answer({"workers": [each.shown() for each in workers]})

    async def kill(request: Request) -> Response:
        check(request)
        for each in workers:
            if each.name == request.path_params["name"]:
                each.kill()
                return answer(each.shown())
        raise HTTPException(404)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/workers", shown),
            Route("/workers/{name}", kill, methods=["DELETE"]),
            Route("/{name}", found.serve),
        ]
    )
