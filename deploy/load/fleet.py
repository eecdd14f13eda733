"""A fleet of processes on this machine.

Law: what was started here ends with us, also when we are killed, and a worker that dies comes back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from deploy.load.client import TOKEN_FILE
from deploy.load.crew import GENERATOR
from deploy.load.warm_tiers import WarmTier, warm_tier
from deploy.load.workers.processes import OPENED
from distributed_state.programs.servers import PostgresServer, free_port, postgres_server
from distributed_state.programs.servers.process import guard, unguard

_ROOT = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-m", "distributed_state"]
_AGAIN = 0.3
_START = 60.0
_TTL = 3.0  # after which others serve the sessions of a dead process


class Child:
    """A process of the command line that is started again if it ends."""

    def __init__(self, name: str, words: list[str], urls: dict[str, str], folder: Path) -> None:
        self._words, self._urls = words, urls
        self._log = folder / f"{name}.log"
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            # Its own session: a Ctrl-C in the terminal is for us, who then end it.
            process = subprocess.Popen(
                [*_COMMAND, *self._words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=_environment() | self._urls,
            )  # fmt: skip
        guard(process.pid)
        return process

    def begin_again(self) -> None:
        """Start it if it has ended."""
        if self.process.poll() is not None:
            unguard(self.process.pid)
            self.process = self._started()

    def end(self, deadline: float) -> None:
        """Wait until then for it to end in order, or else kill it."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        unguard(self.process.pid)

    def log_tail(self) -> str:
        """What it said last."""
        return self._log.read_bytes()[-1500:].decode("utf-8", "replace")


class LocalWorker(Child):
    """A worker that serves; killed, it is started again on its port."""

    def __init__(self, words: list[str], urls: dict[str, str], folder: Path, notice: float) -> None:
        self.port = free_port()
        words = [*words, "serve", "--port", str(self.port), "--tokens", "--notice", str(notice)]
        super().__init__(f"worker-{self.port}", words, urls, folder)

    def ready(self) -> bool:
        """Whether it reaches its servers."""
        with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", self.port, timeout=2)) as connection:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        return False


class LocalFleet:
    """A warm tier with append-only files, PostgreSQL, workers, an archiver, and processes that run handlers."""

    def __init__(
        self,
        warm: WarmTier,
        postgres: PostgresServer,
        namespace: str,
        workers: int,
        folder: Path,
        notice: float,
        handlers: int,
    ) -> None:
        self.warm = warm
        self.warm_kind = warm.kind
        self.postgres = postgres
        self.namespace = namespace
        words = ["--namespace", namespace]
        # Not as arguments: they hold passwords.
        urls = {"DISTRIBUTED_STATE_URL": warm.url, "DISTRIBUTED_STATE_ARCHIVE": postgres.url}
        subprocess.run([*_COMMAND, *words, "migrate"], check=True, capture_output=True, env=_environment() | urls)
        self._make_token(words, urls, folder / "token")
        # As in docker-compose.yml: workers serve, archivers archive.
        self.workers = [LocalWorker(words, urls, folder, notice) for _ in range(workers)]
        self.archiver = Child("archiver", [*words, "archiver"], urls, folder)
        work = ["work", OPENED, "--ttl", str(_TTL)]
        named = urls | {"DISTRIBUTED_STATE_NAMESPACE": namespace}
        self.handlers = [Child(f"handlers-{at}", work, named, folder) for at in range(handlers)]
        self._killed = 0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._supervise, daemon=True)

    def _make_token(self, words: list[str], urls: dict[str, str], file: Path) -> None:
        # By the environment, which the generator's processes inherit: a token has no place in `ps`.
        os.environ[TOKEN_FILE] = str(file)
        rights = ["--all-tenants", "--rights", "read,write,delete,events", "--expires", "1d"]
        token = [*_COMMAND, *words, "token", "create", *rights, "--actor", "load", "--into", str(file)]
        subprocess.run(token, check=True, capture_output=True, env=_environment() | urls)

    @property
    def urls(self) -> list[str]:
        """Of the workers."""
        return [f"http://127.0.0.1:{worker.port}" for worker in self.workers]

    def wait(self) -> None:
        """Until all workers are ready."""
        deadline = time.monotonic() + _START
        for worker in self.workers:
            while not worker.ready():
                if worker.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"a worker does not get ready:\n{worker.log_tail()}")
                time.sleep(0.05)
        self._watch.start()

    def _supervise(self) -> None:
        while not self._ended.wait(_AGAIN):
            for child in self._children():
                child.begin_again()

    def _children(self) -> tuple[Child, ...]:
        return (*self.workers, *self.handlers, self.archiver)

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU that each part took since it began; empty where /proc is not there."""
        parts = {
            "workers": [worker.process.pid for worker in self.workers],
            "Redis": [server.pid for server in self.warm.servers() if server.running],
        }
        parts |= {"the archiver": [self.archiver.process.pid]}
        parts |= {"PostgreSQL": _family(self.postgres.pid), "the generator": _family(os.getpid(), GENERATOR)}
        return {name: sum(map(_cpu, pids)) for name, pids in parts.items()} if Path("/proc/self/stat").exists() else {}

    # Faults: each begins, and returns what ends it, if it does not end by itself

    def kill_worker(self) -> None:
        """SIGKILL to the next worker; it comes back after a moment."""
        worker = self.workers[self._killed % len(self.workers)]
        self._killed += 1
        worker.process.kill()
        deadline = time.monotonic() + _START
        while time.monotonic() < deadline and (worker.process.poll() is not None or not worker.ready()):
            time.sleep(0.05)

    def kill_handler(self) -> None:
        """SIGKILL to the next process that runs handlers; another one begins after a moment."""
        child = self.handlers[self._killed % len(self.handlers)]
        self._killed += 1
        killed = child.process
        killed.kill()
        while child.process is killed:
            time.sleep(0.05)

    def roll(self) -> None:
        """Restart one worker after the other in order, as an upgrade does; each has to be ready before the next."""
        for worker in self.workers:
            leaving = worker.process
            leaving.send_signal(signal.SIGTERM)
            if code := leaving.wait(_START):
                raise RuntimeError(f"a worker ended with {code} when it was told to:\n{worker.log_tail()}")
            deadline = time.monotonic() + _START  # the supervisor starts it
            while not worker.ready():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a worker does not get ready again:\n{worker.log_tail()}")
                time.sleep(0.05)

    def stop_redis(self, seconds: float) -> None:
        """End the warm tier in order, and start it again with its append-only files."""
        self.warm.stop(seconds)

    def kill_primary(self, seconds: float) -> float | None:
        """SIGKILL to a primary."""
        return self.warm.kill_primary(seconds)

    def failover(self) -> float | None:
        """Let a replica take over from a primary that is well."""
        return self.warm.failover()

    def reshard(self) -> None:
        """Move a fifth of the slots."""
        self.warm.reshard()

    def pause_postgres(self, seconds: float) -> None:
        """Freeze PostgreSQL."""
        self.postgres.pause()
        time.sleep(seconds)
        self.postgres.resume()

    def close(self) -> None:
        """End the workers: in order, or else."""
        self._ended.set()
        os.environ.pop(TOKEN_FILE, None)
        if self._watch.is_alive():
            self._watch.join()
        for child in self._children():
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8
        for child in self._children():
            child.end(deadline)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "DISTRIBUTED_STATE_ARCHIVER": "false"}


def _family(pid: int, called: str = "") -> list[int]:
    """A process and its children, those whose command has this word in it."""
    words: list[str] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # each thread has those that it started
        with suppress(OSError):
            words += children.read_text().split()
    return [pid, *(int(word) for word in words if called in _command(word))]


def _command(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    return ""  # it ended meanwhile, as a connection of PostgreSQL does


def _cpu(pid: int) -> float:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextmanager
def local_fleet(
    workers: int, folder: Path, namespace: str, warm: str = "single", notice: float = 1.0, handlers: int = 0
) -> Iterator[LocalFleet]:
    """Start all of it on free ports, and end it."""
    with (
        warm_tier(warm, folder / "redis") as tier,
        postgres_server("-c", "max_connections=200", directory=folder / "postgres") as postgres,
    ):
        fleet = LocalFleet(tier, postgres, namespace, workers, folder, notice, handlers)
        try:
            fleet.wait()
            yield fleet
        finally:
            fleet.close()
