"""A server in a process of its own. Law: whoever starts it ends it and removes its files, however the block ends.

Until then nobody else on the machine gets in: no password of a server stands in a command line or in a text, and what a
server writes is readable for its own user alone, whatever the umask here is.

Design: section 19.
"""

from __future__ import annotations

import atexit
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed_state.cold.private_files import opener
from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers import warden

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
# Below the ports that systems lend to outgoing connections: otherwise a client that retries while its server is
# down may be lent the server's own port, and the server could not come back.
_PORTS = range(15_000, 32_000)
# Those given away here. A server that is about to start, or is down for a moment, does not listen on its port.
_given = set[int]()


def free_port() -> int:
    """Return a loopback port that nobody listens on now, and never the same one twice."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ConfigurationError(f"none of 100 ports tried from {_PORTS.start} to {_PORTS.stop} is free")


def wait_until(condition: Callable[[], bool], missing: str, seconds: float = _START_SECONDS) -> None:
    """Wait until the condition holds. Raises ConfigurationError saying what is `missing` if it never does.

    That a server cannot be asked just now counts as not yet.
    """
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{missing} within {seconds:g} s")
        time.sleep(0.03)


def new_password() -> str:
    """Return a password that nobody guesses, which needs no quotes in a URL or a configuration."""
    return secrets.token_hex(24)


class Server(ABC):
    """One child process that can be ended, frozen and started again on the same port and files."""

    stop_signal = signal.SIGTERM

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.directory = directory
        self.log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._owner = os.getpid()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL under which a store finds this server. It holds a password: give it on by environment or stdin."""

    @property
    def pid(self) -> int:
        """The process id of the running server. Raises ConfigurationError if it was stopped."""
        if self._process is None:
            raise ConfigurationError(f"the server on port {self.port} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; a paused server counts as running."""
        return self._process is not None and self._process.poll() is None

    @property
    def answering(self) -> bool:
        """Whether it runs and was not paused."""
        return self.running and not self._paused

    @abstractmethod
    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        """Start the process with its output going to `log`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server takes commands now. May raise OSError."""

    def start(self) -> None:
        """Start, or start again with the files that are there, and wait until the server answers."""
        if self.running:
            return
        deadline = time.monotonic() + _START_SECONDS
        self._spawn()
        while not self._ready():
            if not self.running:
                if not self._may_try_again():
                    raise ConfigurationError(f"the server on port {self.port} ended at once:\n{self._log_tail()}")
                self._spawn()
            if time.monotonic() > deadline:
                self.kill()
                raise ConfigurationError(f"no answer from port {self.port} in {_START_SECONDS} s:\n{self._log_tail()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it in the orderly way."""
        if self.running:
            self.resume()
            self._send(self.stop_signal)
            self._wait()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        if self.running:
            self._send(signal.SIGKILL)
            self._wait()

    def pause(self) -> None:
        """Freeze it with SIGSTOP: connections stay open and nothing answers."""
        self._paused = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self._paused = False
        self._send(signal.SIGCONT)

    def _processes(self) -> list[int]:
        return [self.pid]

    def _send(self, number: signal.Signals) -> None:
        # A forked child inherits this object; the server is not its to end.
        if os.getpid() != self._owner:
            return
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _spawn(self) -> None:
        self._paused = False
        with open(self.log, "ab", opener=opener) as log:
            self._process = self._launch(log.fileno())
        warden.begin(self._process.pid)
        atexit.unregister(self.kill)
        atexit.register(self.kill)

    def _wait(self) -> None:
        if self._process is None or os.getpid() != self._owner:
            return
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._process.wait()
        warden.over(self._process.pid)
        atexit.unregister(self.kill)

    def _ready(self) -> bool:
        try:
            return self.running and self._answers()
        except OSError:
            return False

    def _may_try_again(self) -> bool:
        return False

    def _log_tail(self, size: int = 1000) -> str:
        return self.log.read_bytes()[-size:].decode("utf-8", "replace").strip() or "(its log is empty)"


@contextmanager
def working_folder(directory: Path | None) -> Iterator[Path]:
    """This folder, made if need be, or one that goes at the end."""
    if directory is not None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="distributed-state-", ignore_cleanup_errors=True) as place:
        warden.begin(Path(place))
        yield Path(place)
    warden.over(Path(place))


def launch(
    command: Sequence[str], cwd: Path, log: int, *, secret: str = "", nobodys_group: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own, and say the `secret` lines of its configuration on its stdin.

    With a group it runs as the user nobody, in this group and in no other.
    """
    nobody = nobodys_group is not None
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.PIPE if secret else subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Its own session: a Ctrl-C in the terminal is for us, who then end the server.
        start_new_session=True,
        user="nobody" if nobody else None,
        group=nobodys_group,
        extra_groups=[] if nobody else None,
        # Servers open their data for all who may enter the folder; that may be one of the caller's.
        umask=0o077,
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as lines:  # one that ended at once said why in its log
            lines.write(secret.encode())
    return process
