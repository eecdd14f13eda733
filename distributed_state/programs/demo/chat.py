"""A chat with agents that can be killed: two workers of the service, and a page that shows their answers.

Law: a worker may die at any moment, and every posted message is answered. A worker is a process with the service and an
agent, which takes posted messages and streams the answers of a scripted model. The process of the command serves the
page, and starts killed workers again. The page does everything else through the interface of the workers, as the page
of any user would.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distributed_state import AsyncStateStore, LockTimeout, StateStore, Stopped
from distributed_state.errors import StateError
from distributed_state.programs.demo.lifecycle import place
from distributed_state.programs.servers import free_port, working_folder
from distributed_state.programs.service import Access, Limits, callers_policy, serve
from distributed_state.programs.service.answers import PageFiles, answer, page_headers
from distributed_state.programs.worker_processes import Message, Parent, WorkerProcess
from distributed_state.results import Notice

log = logging.getLogger(__name__)
PATH = "/chat"
ID = "chat"  # of the conversation
NAMES = ("ada", "ben")
_PROGRAM = (sys.executable, "-m", "distributed_state.programs.demo.chat")
_LEASE_SECONDS = 2.0  # a dead worker's turn is taken over after this time
_AWAY_SECONDS = 5.0  # after which a killed worker is started again: later than that
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 0.5  # between looks at the inbox, because the end of a dead worker's lease is not published


def chat(url: str | None, port: int, pause: float, report: Callable[[str], None]) -> None:
    """Run the workers, and serve the page, until SIGTERM or Ctrl-C.

    `pause` is the time in seconds between two words of an answer. `report` is called with the link to the page.
    """
    key = secrets.token_urlsafe(32)
    port = port or free_port()
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

        origins = [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")]
        shared = {"store": settings, "key": key, "pause": pause, "origins": origins}
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


# The workers, in the process of the command


class Worker:
    """One worker, which is started again whenever it was killed."""

    def __init__(self, name: str, shared: dict[str, Any], log: Path) -> None:
        self.name = name
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._orders = {**shared, "name": name, "port": port}
        self._log = log
        self._process: WorkerProcess | None = None
        self._serves = False

    def run(self, leaving: threading.Event) -> None:
        """Keep the process running until `leaving` is set, and end it then."""
        while not leaving.is_set():
            process = self._process = WorkerProcess(_PROGRAM, self._receive, log=self._log)
            process.send(self._orders)
            while process.running and not leaving.wait(0.1):
                pass
            expected = {-signal.SIGKILL}
            if leaving.is_set():
                expected = {0, -signal.SIGTERM}  # the latter while it starts
                process.terminate()
                process.wait(_STOP_SECONDS)
            code = process.end()
            if code not in expected:
                log.warning("%s ended with %s: %s", self.name, code, process.complaint())
            leaving.wait(_AWAY_SECONDS)

    def _receive(self, report: Message | None) -> None:
        self._serves = report is not None

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def shown(self) -> dict[str, Any]:
        """The worker, for the page."""
        process = self._process
        there = process is not None and process.running
        state = "dead" if not there else "serving" if self._serves else "starting"
        return {"name": self.name, "url": self.url, "state": state, "pid": process.pid if process and there else None}


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
    found = PageFiles(files("distributed_state.programs.demo") / "page", page_headers(*(each.url for each in workers)))

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


# The process of a worker


class Leaving(Exception):
    """The worker stops in the middle of an answer, which is not written."""


class ChatAgent:
    """Answers posted messages, one turn each, oldest first."""

    def __init__(self, name: str, pause: float) -> None:
        self.leaving = threading.Event()
        self._name = name
        self._pause = pause

    def run(self, settings: dict[str, Any]) -> None:
        """Answer until `leaving` is set."""
        with StateStore.open(**settings) as store:
            while not self.leaving.is_set():
                try:
                    self._listen(store.session(ID))
                except Leaving:
                    return
                except StateError as error:
                    log.warning("%s: %s", self._name, error)
                    self.leaving.wait(_LOOK_SECONDS)

    def _listen(self, session: Any) -> None:
        with session.output(notices=True) as output:
            while not self.leaving.is_set():
                part = output.next(_LOOK_SECONDS)
                if part is None or (isinstance(part, Notice) and part.name in ("inbox.posted", "turn.ended")):
                    with suppress(LockTimeout):  # the other worker is speaking
                        self._answer(session)

    def _answer(self, session: Any) -> None:
        """Answer the message that waits longest, unless a turn runs."""
        if not session.inbox():
            return
        with session.turn(busy="reject", ttl=_LEASE_SECONDS) as turn:
            if not turn.inbox:
                return
            (given,) = turn.take(turn.inbox[0].number)
            turn.stream({"worker": self._name})
            said = ""
            try:
                with turn.stoppable():
                    for word in scripted(given.number):
                        said += word
                        turn.stream(word)
                        if self.leaving.wait(self._pause):
                            raise Leaving
            except Stopped:
                said += "(stopped)"
            turn.append(given.message, {"role": "assistant", "name": self._name, "content": said})


ANSWERS = (
    "Oslo is lovely in June, and it is light until late. Take the ferry from the harbour to Hovedøya in the morning, "
    "swim on the south side of the island, and look at the ruins of the monastery. In the afternoon walk up the roof "
    "of the opera house, and from there along the water to the Munch museum. In the evening sit at Vippa, where a "
    "dozen kitchens share one hall, and watch the boats come in. If it rains, the National Museum has room for a day.",
    "For Bergen, take the morning train. The line climbs from the fjord to the high plain at Finse, where snow lies "
    "until July, and comes down again through forty tunnels; sit on the left. In Bergen stay near Bryggen, go up "
    "Fløyen on foot and come down by the funicular, and eat fish soup at the market. Keep one day for the boat to "
    "Mostraumen, and take a coat: it rains on two days out of three, and the third one is worth it.",
    "Two nights in each city are enough for a first visit, with the train between them as a day of its own. Book the "
    "train early, the hotels a month ahead, and nothing else: museums rarely sell out, and the weather decides "
    "better than a plan. Bring shoes for wet stone, a swimsuit, and a card, because few places take cash. With an "
    "evening to spare, take the tram to Ekeberg and see the city from where Munch painted the sky.",
)


def scripted(number: int) -> list[str]:
    """The words of an answer, as a model would stream them: to an input with this number."""
    return re.findall(r"\S+\s*", ANSWERS[(number - 1) % len(ANSWERS)] + " ")


def main() -> None:
    """Run a worker until SIGTERM, or until the process that started it has ended."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    parent = Parent()
    orders = parent.orders()
    given = next(orders)

    def leave_with_parent() -> None:
        for _ in orders:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    async def opened() -> AsyncStateStore:
        return await AsyncStateStore.open(**given["store"], access=callers_policy())

    agent = ChatAgent(given["name"], given["pause"])
    speaking = threading.Thread(target=agent.run, args=(given["store"],))
    speaking.start()
    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        serve(
            opened,
            port=given["port"],
            access=Access(key=given["key"]),
            limits=Limits(notice=0.0, drain=1.0),
            origins=tuple(given["origins"]),
            report=lambda line: parent.send({"kind": line}) if line.startswith("serving") else None,
        )
    finally:
        agent.leaving.set()
        speaking.join()


if __name__ == "__main__":
    main()
