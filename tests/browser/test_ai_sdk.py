"""Vercel's AI SDK in Node, with its packages from npm, follows turns at a running service.

It uses the transport of the page docs/how-to/streaming-browser.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks_of
from serving import served

from distributed_state import StateStore
from distributed_state.programs.servers import wait_until
from distributed_state.programs.service import Limits, Service

HERE = Path(__file__).parent
ID = "a trip/1"
DIES = """
import sys, time
from distributed_state import StateStore
url, archive, namespace, id = sys.argv[1:]
with StateStore.open(url, archive=archive, namespace=namespace, stream_interval=0.0) as store:
    with store.session(id).turn(request_id="r") as turn:
        turn.stream("Ber")
        print("streamed", flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that package.json names, and the program that uses them."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: install Node.js 18 or newer and npm, or run `bash .ci/run pages`")
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "chat.js"):
        shutil.copy(HERE / name, folder)
    shown = {block.file: block.text for block in blocks_of(ROOT / "docs" / "how-to" / "streaming-browser.md")}
    (folder / "transport.js").write_text(shown["transport.js"])
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert installed.returncode == 0, f"npm install failed, of {HERE / 'package.json'}:\n{installed.stderr}"
    return folder


class Conversation:
    """A conversation at a service, and a route that accepts its messages."""

    def __init__(self, place: dict[str, str], store: StateStore, service: Service, api: str, accepts: str) -> None:
        self.place, self.store, self.service = place, store, service
        self.given = {"api": api, "accepts": accepts, "id": ID}
        self.session = store.session(ID)


@pytest.fixture
def conversation(servers: Any, tmp_path: Path) -> Iterator[Conversation]:
    place = {"archive": f"sqlite:///{tmp_path}/a.db", "namespace": f"t{os.urandom(6).hex()}"}
    place["url"] = servers.redis("valkey").url
    service = Service(Limits(heartbeat=1.0))
    with StateStore.open(**place, stream_interval=0.0) as store, served(**place, service=service) as http:
        store.session(ID).append({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"})
        with accepting(store) as accepts:
            yield Conversation(place, store, service, str(http.base_url.join("/v1")), accepts)


@contextmanager
def accepting(store: StateStore) -> Iterator[str]:
    """The route of an application that accepts messages. Its turns are those of the test."""

    class Route(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            store.session(ID).post({"role": "user", "content": text}, request_id=self.headers["Idempotency-Key"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Route) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Chat:
    """A chat in a process of its own, as a page shows it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.states: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.states.append(json.loads(line))

    def do(self, command: str, given: str | None = None) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"command": command, "given": given}), file=self._process.stdin, flush=True)

    @property
    def status(self) -> str:
        return str(self.states[-1]["status"])

    @property
    def parts(self) -> list[Any]:
        """Those of the last message: texts, and the types of others."""
        return [each.get("text", each["type"]) for each in self.states[-1]["messages"][-1]["parts"]]

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The role and the text of each message."""
        texts = (
            (each["role"], "".join(part.get("text", "") for part in each["parts"]))
            for each in self.states[-1]["messages"]
        )
        return list(texts)

    def until(self, status: str, *parts: str) -> None:
        wait_until(lambda: (self.status, self.parts) == (status, [*parts]), f"{status} {parts}", seconds=60)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reading.join(30)
        assert self._process.wait(30) == 0


@contextmanager
def opened(packages: Path, conversation: Conversation) -> Iterator[Chat]:
    """A page that is opened, or reloaded."""
    command = ["node", "chat.js", json.dumps(conversation.given)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=packages, **pipes) as process:
        chat = Chat(process)
        try:
            wait_until(lambda: bool(chat.states or process.poll()), "the chat shows the messages", seconds=60)
            yield chat
            chat.close()
        finally:
            process.kill()


def test_a_reloaded_chat_shows_the_text_so_far_and_then_the_rest(packages: Path, conversation: Conversation) -> None:
    with ExitStack() as running:
        turn = running.enter_context(conversation.session.turn())
        turn.stream("Os")
        with opened(packages, conversation) as chat:
            chat.do("resume")
            chat.until("streaming", "Os")
        with opened(packages, conversation) as chat:
            chat.do("resume")
            chat.until("streaming", "Os")
            turn.stream("lo")
            chat.until("streaming", "Oslo")
            turn.append({"role": "assistant", "content": "Oslo"})
            running.close()
            chat.until("ready", "Oslo")
            assert chat.texts == [("user", "Hello"), ("assistant", "Hello!"), ("assistant", "Oslo")]
    with opened(packages, conversation) as chat:
        assert chat.texts == [("user", "Hello"), ("assistant", "Hello!"), ("assistant", "Oslo")]


def test_a_chat_stays_as_it_is_if_no_turn_runs(packages: Path, conversation: Conversation) -> None:
    with opened(packages, conversation) as chat:
        chat.do("resume")
        wait_until(lambda: chat.states[-1]["done"] == 1, "it was answered", seconds=60)
        assert {each["status"] for each in chat.states} == {"ready"}
        assert chat.texts == [("user", "Hello"), ("assistant", "Hello!")]


def test_the_parts_after_a_restart_are_marked(packages: Path, conversation: Conversation) -> None:
    place = conversation.place
    command = [sys.executable, "-c", DIES, place["url"], place["archive"], place["namespace"], ID]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "streamed\n"
            with opened(packages, conversation) as chat:
                chat.do("resume")
                chat.until("streaming", "Ber")
                worker.kill()
                with conversation.session.turn(request_id="r") as turn:
                    turn.stream("Oslo")
                    chat.until("streaming", "Ber", "data-restarted", "Oslo")
                    turn.append({"role": "assistant", "content": "Oslo"})
                chat.until("ready", "Ber", "data-restarted", "Oslo")
        finally:
            worker.kill()


def test_a_message_is_sent_and_its_answer_streams_also_after_a_reload(
    packages: Path, conversation: Conversation
) -> None:
    session = conversation.session
    with opened(packages, conversation) as chat:
        chat.do("send", "Where to?")
        wait_until(lambda: bool(session.inbox()), "it is posted", seconds=60)
        with session.turn() as turn:
            turn.append(*(each.message for each in turn.take()))
            turn.stream("Oslo")
            chat.until("streaming", "Oslo")
            with opened(packages, conversation) as reloaded:
                reloaded.do("resume")
                reloaded.until("streaming", "Oslo")
                assert reloaded.texts[2:] == chat.texts[2:] == [("user", "Where to?"), ("assistant", "Oslo")]
            turn.append({"role": "assistant", "content": "Oslo"})
        chat.until("ready", "Oslo")
    with opened(packages, conversation) as chat:
        assert chat.texts[2:] == [("user", "Where to?"), ("assistant", "Oslo")]


def test_a_chat_goes_on_when_the_service_ends_its_stream(packages: Path, conversation: Conversation) -> None:
    with opened(packages, conversation) as chat:
        with conversation.session.turn() as turn:
            turn.stream("Os")
            chat.do("resume")
            chat.until("streaming", "Os")
            for stream, (_, _, watching) in [*conversation.service._streams.items()]:
                watching.get_loop().call_soon_threadsafe(stream.end)
            wait_until(lambda: "ready" in {each["status"] for each in chat.states[1:]}, "it has ended", seconds=60)
            turn.stream("lo")
            chat.until("streaming", "Oslo")
            turn["n"] = 1
        chat.until("ready", "Oslo")


def test_a_chat_shows_that_a_turn_failed(packages: Path, conversation: Conversation) -> None:
    with opened(packages, conversation) as chat:
        with pytest.raises(ZeroDivisionError), conversation.session.turn() as turn:
            turn.stream("Os")
            chat.do("resume")
            chat.until("streaming", "Os")
            raise ZeroDivisionError
        chat.until("error", "Os")
