"""A PostgreSQL server. Law: started by root it runs as the user nobody, because PostgreSQL refuses to run as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers.binaries import postgres_binaries
from distributed_state.programs.servers.process import Server, launch, working_folder


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
            if launch(command, self.directory, log.fileno(), drop_root=True).wait() != 0:
                raise ConfigurationError(f"initdb failed:\n{self._log_tail()}")

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories="]
        words = [word for setting in settings for word in ("-c", setting)]
        command = [str(self._binaries / "postgres"), "-D", str(self._data), *words, *self._options]
        return launch(command, self.directory, log, drop_root=True)

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            body = struct.pack("!i", 3 << 16) + b"user\0postgres\0database\0postgres\0\0"
            connection.sendall(struct.pack("!i", len(body) + 4) + body)
            # 'R' lets us in; 'E' says that it still starts, or recovers from a crash.
            ready = connection.recv(1) == b"R"
            connection.sendall(b"X\0\0\0\4")
            return ready

    def _processes(self) -> list[int]:
        return [self.pid, *children(self.pid)]

    def _send(self, number: signal.Signals) -> None:
        if number == self.stop_signal:
            os.kill(self.pid, number)  # the postmaster tells its backends
        else:
            super()._send(number)

    def _may_try_again(self) -> bool:
        # After a crash the backends of the old postmaster may live for another moment.
        return "shared memory block" in self._log_tail(600)


@contextmanager
def postgres_server(
    *options: str, binaries: Path | None = None, directory: Path | None = None
) -> Iterator[PostgresServer]:
    """Run a new, empty PostgreSQL server while the block runs; as root it runs as the user nobody."""
    with working_folder(directory) as place:
        server = PostgresServer(binaries or postgres_binaries(), options, place)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _binaries_for_nobody(binaries: Path, directory: Path) -> Path:
    """The folder itself, or a copy below `directory` if the user nobody may not look into it (a venv of root's)."""
    try:
        with (directory / "server.log").open("ab") as log:
            launch([str(binaries / "postgres"), "--version"], directory, log.fileno(), drop_root=True).wait()
        return binaries
    except PermissionError:
        package = binaries.parent.parent
        for tree in (package, package.with_name(f"{package.name}.libs")):
            if tree.is_dir():
                shutil.copytree(tree, directory / "copy" / tree.name)
        return directory / "copy" / binaries.relative_to(package.parent)


def children(pid: int) -> list[int]:
    """The processes that a process started and that have not ended."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        table = subprocess.run(["ps", "-axo", "ppid=,pid="], capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in table.splitlines()]
        words = [child for parent, child in rows if parent == str(pid)]
    return [int(word) for word in words]
