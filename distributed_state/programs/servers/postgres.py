"""A PostgreSQL server. Law: if root starts it, it runs as the user nobody, because PostgreSQL refuses to run as root.

Other programs run as nobody too, so only a group that no other process belongs to may enter its folder.
"""

from __future__ import annotations

import grp
import hmac
import os
import random
import secrets
import shutil
import signal
import socket
import struct
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import pbkdf2_hmac, sha256
from pathlib import Path

from distributed_state.errors import ConfigurationError
from distributed_state.programs.servers.process import Server, launch, new_password, postgres_binaries, working_folder
from distributed_state.settings import private_opener


class PostgresServer(Server):
    """A PostgreSQL process with one superuser, `postgres`, with a new password."""

    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave

    def __init__(self, binaries: Path, options: Sequence[str], directory: Path) -> None:
        super().__init__(directory)
        self.password = new_password()
        self._options = options
        self._data = directory / "data"
        self._data.mkdir(mode=0o700)
        self._group: int | None = None
        if os.geteuid() == 0:
            self._group = _unused_group()
            _enter_as(directory, self._group)
            shutil.chown(self._data, "nobody", self._group)
            binaries = _binaries_for_nobody(binaries, directory, self._group)
        self._binaries = binaries
        self._initialise()

    @property
    def url(self) -> str:
        """The URL for `archive`."""
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{self.port}/postgres"

    def _initialise(self) -> None:
        said = self.directory / "password"
        with open(said, "x", encoding="utf-8", opener=private_opener) as file:
            file.write(f"{_verifier(self.password)}\n")
        if self._group is not None:
            shutil.chown(said, "nobody", self._group)
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres", f"--pwfile={said}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        try:
            with open(self.log, "ab", opener=private_opener) as log:
                code = launch(command, self.directory, log.fileno(), nobodys_group=self._group).wait()
            if code != 0:
                raise ConfigurationError(f"initdb failed:\n{self._log_tail()}")
        finally:
            said.unlink()

    def _launch(self, log: int) -> subprocess.Popen[bytes]:
        settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories="]
        words = [word for setting in settings for word in ("-c", setting)]
        command = [str(self._binaries / "postgres"), "-D", str(self._data), *words, *self._options]
        return launch(command, self.directory, log, nobodys_group=self._group)

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            body = struct.pack("!i", 3 << 16) + b"user\0postgres\0database\0postgres\0\0"
            connection.sendall(struct.pack("!i", len(body) + 4) + body)
            # 'R' requests the password; 'E' reports that it is still starting or recovering from a crash.
            return connection.recv(1) == b"R"

    def _processes(self) -> list[int]:
        return [self.pid, *children(self.pid)]

    def _send(self, number: signal.Signals) -> None:
        if number == self.stop_signal:
            os.kill(self.pid, number)  # the postmaster passes it on to its backends
        else:
            super()._send(number)

    def _may_try_again(self) -> bool:
        # After a crash the backends of the old postmaster may still live for a moment.
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


def _verifier(password: str) -> str:
    """The verifier that PostgreSQL stores for a password, for SCRAM (RFC 5803)."""
    # One iteration, not a server's usual 4,096, which take 4 ms per connection: 24 random bytes cannot be guessed.
    times, salt = 1, secrets.token_bytes(16)
    salted = pbkdf2_hmac("sha256", password.encode(), salt, times)
    stored = sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    salt_text, stored_text, server_text = (b64encode(each).decode() for each in (salt, stored, server))
    return f"SCRAM-SHA-256${times}:{salt_text}${stored_text}:{server_text}"


def _unused_group() -> int:
    """The number of a group without a name: its only members are the processes that are put there."""
    # Below 65,536: a container may not have larger numbers.
    names = {each.gr_gid for each in grp.getgrall()}
    return random.SystemRandom().choice([number for number in range(20_000, 60_000) if number not in names])


def _enter_as(directory: Path, group: int) -> None:
    """Let only the group enter a folder that belongs to root, without the right to list it."""
    shutil.chown(directory, group=group)
    directory.chmod(0o710)


def _binaries_for_nobody(binaries: Path, directory: Path, group: int) -> Path:
    """The folder itself, or a copy below `directory` if the user nobody cannot read it (a venv of root's)."""
    try:
        with open(directory / "server.log", "ab", opener=private_opener) as log:
            launch([str(binaries / "postgres"), "--version"], directory, log.fileno(), nobodys_group=group).wait()
        return binaries
    except PermissionError:
        package, copy = binaries.parent.parent, directory / "copy"
        copy.mkdir()
        _enter_as(copy, group)
        for tree in (package, package.with_name(f"{package.name}.libs")):
            if tree.is_dir():
                shutil.copytree(tree, copy / tree.name)
        return copy / binaries.relative_to(package.parent)


def children(pid: int) -> list[int]:
    """The running child processes of a process."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        table = subprocess.run(["ps", "-axo", "ppid=,pid="], capture_output=True, text=True, check=False).stdout
        rows = [line.split() for line in table.splitlines()]
        words = [child for parent, child in rows if parent == str(pid)]
    return [int(word) for word in words]
