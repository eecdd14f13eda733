"""The fleet that `docker compose` runs on this machine. Law: a container that is ended here is started again here."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import suppress

from deploy.load.warm_tiers import SHARE, moment

SERVICE = "agents"  # as deploy/sentinel.yml names what the Sentinels watch
_SLOTS = 16_384


class ComposeFleet:
    """The fleet that `docker compose` runs on this machine; faults are its commands."""

    def __init__(self, warm_kind: str = "single", *words: str) -> None:
        files = [] if warm_kind == "single" else ["-f", "docker-compose.yml", "-f", f"deploy/{warm_kind}.yml"]
        self.warm_kind = warm_kind
        self._compose = ["docker", "compose", *files, *words]
        self._killed = 0

    def _run(self, *words: str) -> str:
        done = subprocess.run([*self._compose, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"docker compose {' '.join(words)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    @property
    def urls(self) -> list[str]:
        """Of the workers, as they are published on this machine."""
        count = len(self._run("ps", "-q", "worker").split())
        if not count:
            raise RuntimeError("no worker runs: docker compose up --wait")
        return [f"http://{self._run('port', '--index', str(at + 1), 'worker', '8080').strip()}" for at in range(count)]

    def kill_worker(self) -> None:
        """SIGKILL to the process of a worker; it is started again, because what `docker kill` ends stays down."""
        ids = self._run("ps", "-q", "worker").split()
        id = ids[self._killed % len(ids)]
        self._killed += 1
        subprocess.run(["docker", "kill", id], check=True, capture_output=True)
        subprocess.run(["docker", "start", id], check=True, capture_output=True)

    def stop_redis(self, seconds: float) -> None:
        """Stop and start the warm tier, of several servers all those that hold data."""
        servers = self._servers()
        self._run("stop", *servers)
        time.sleep(seconds)
        self._run("start", *servers)

    def pause_postgres(self, seconds: float) -> None:
        """Freeze the cold tier."""
        self._run("pause", "postgres")
        time.sleep(seconds)
        self._run("unpause", "postgres")

    def kill_primary(self, seconds: float) -> float | None:
        """SIGKILL to a primary; it is started again, one that stands alone after so long, else when it is replaced."""
        primary = self._primary()
        replicas = [each for each in self._servers() if each != primary]
        id = self._run("ps", "-q", primary).strip()
        before = self._elected_by(replicas) if replicas else frozenset()
        subprocess.run(["docker", "kill", id], check=True, capture_output=True)
        if replicas:
            elected = moment(lambda: bool(self._elected_by(replicas) - before), "no replica was elected")
        else:
            time.sleep(seconds)
        subprocess.run(["docker", "start", id], check=True, capture_output=True)
        return elected if replicas else None

    def failover(self) -> float | None:
        """Let a replica take over from a primary that is well."""
        before = self._elected_by(self._servers())
        if self.warm_kind == "sentinel":
            self._ask("sentinel-1", "SENTINEL", "FAILOVER", SERVICE)
        else:
            replica = next(each for each in self._servers() if each not in before)
            self._ask(replica, "CLUSTER", "FAILOVER")
        return moment(lambda: bool(self._elected_by(self._servers()) - before), "no replica was elected")

    def reshard(self) -> None:
        """Move a fifth of every primary's slots to the next one, by valkey-cli, which moves one after the other."""
        ids = [self._ask(each, "CLUSTER", "MYID").strip() for each in sorted(self._elected_by(self._servers()))]
        for at, id in enumerate(ids):
            target = ids[(at + 1) % len(ids)]
            moved = ("--cluster-from", id, "--cluster-to", target, "--cluster-slots", str(_SLOTS // len(ids) // SHARE))
            self._ask("valkey-1", "--cluster", "reshard", "127.0.0.1:6379", *moved, "--cluster-yes")

    def _servers(self) -> list[str]:
        """The services that hold data."""
        names = self._run("ps", "--services", "--all").split()
        return sorted(name for name in names if re.fullmatch(r"valkey(-\d+)?", name))

    def _primary(self) -> str:
        servers = self._servers()
        return servers[0] if len(servers) == 1 else min(self._elected_by(servers))

    def _elected_by(self, servers: list[str]) -> frozenset[str]:
        """Those of the servers that say they are a primary now."""
        found = set()
        for each in servers:
            with suppress(RuntimeError):  # it does not answer
                if self._ask(each, "ROLE").startswith("master"):
                    found.add(each)
        return frozenset(found)

    def _ask(self, service: str, *words: str) -> str:
        """What valkey-cli says in the container of a service, as the operator."""
        port = "26379" if service.startswith("sentinel") else "6379"
        command = 'REDISCLI_AUTH=$VALKEY_OPERATOR_PASSWORD exec valkey-cli --user operator -p "$0" "$@"'
        return self._run("exec", "-T", service, "sh", "-c", command, port, *words)
