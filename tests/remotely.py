"""Workers of the service for tests of the remote store, and a line to them that breaks. Law: both are real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from below import ROOT


class Serving:
    """`distributed-state serve` of a store at this place, as a process that is started when its `url` is asked for."""

    def __init__(self, place: Mapping[str, str], *words: str) -> None:
        self._place = place
        self._words = words
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    def start(self) -> Self:
        """Start it; several start side by side."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # Not as words: a password would stand in the list of processes.
        told = {f"DISTRIBUTED_STATE_{name.upper()}": value for name, value in self._place.items()}
        command = [sys.executable, "-m", "distributed_state", "serve", "--port", "0", "--notice", "0.05", *self._words]
        environment = os.environ | {"PYTHONPATH": path} | told
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        return self

    @property
    def url(self) -> str:
        """Where it serves."""
        if not self._url:
            process = self._process or self.start()._process
            assert process is not None
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving on "), f"{line} {process.communicate(timeout=20)}"
            self._url = line.split()[-1]
        return self._url

    def kill(self) -> None:
        """End it as the machine would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Line:
    """A TCP line to a worker. `lose(count)` breaks it that often when an answer comes: the work is done then."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.lost = 0
        self._losing = 0
        self._when: Callable[[], None] = lambda: None
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, count: int, when: Callable[[], None] = lambda: None) -> None:
        """Lose the next answers; `when` is called before each is noticed."""
        self._losing = count
        self._when = when

    def cut(self) -> None:
        """Break what is open."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                place = urlsplit(self.to)
                try:
                    far = socket.create_connection((place.hostname or "", place.port or 0))
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(source, sink, answers), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self._losing:
                    self._losing -= 1
                    self.lost += 1
                    self._when()
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        self.cut()
