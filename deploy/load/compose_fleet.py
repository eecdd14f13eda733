"""The fleet that `docker compose` runs on this machine. Law: a container that is ended here is started again here."""

from __future__ import annotations

import re
import subprocess
import time

from deploy.load.warm_tiers import SHARE

SERVICE = "agents"  # as deploy/sentinel.yml names what the Sentinels watch
_SLOTS = 16_384
_LOOK = 0.02
_HEALTHY = 60.0


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

    def roll(self) -> None:
        """Restart every worker in order, one after the other; each has to be healthy before the next."""
        for id in self._run("ps", "-q", "worker").split():
            subprocess.run(["docker", "restart", id], check=True, capture_output=True)
            deadline = time.monotonic() + _HEALTHY
            while self._health(id) != "healthy":
                if time.monotonic() > deadline:
                    raise RuntimeError(f"worker {id[:12]} is not healthy again within {_HEALTHY:g} s")
                time.sleep(0.2)

    def _health(self, id: str) -> str:
        words = ["docker", "inspect", "--format", "{{.State.Health.Status}}", id]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

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
        watched = self._watched(primary)
        id = self._run("ps", "-q", primary).strip()
        subprocess.run(["docker", "kill", id], check=True, capture_output=True)
        elected = None
        if watched is None:
            time.sleep(seconds)
        else:
            elected = self._replaced(*watched)
        subprocess.run(["docker", "start", id], check=True, capture_output=True)
        return elected

    def failover(self) -> float | None:
        """Let a replica take over from a primary that is well."""
        primary = self._primary()
        watched = self._watched(primary)
        assert watched is not None
        if self.warm_kind == "sentinel":
            self._ask("sentinel-1", "SENTINEL", "FAILOVER", SERVICE)
        else:
            lines = [line.split() for line in self._ask(primary, "CLUSTER", "NODES").splitlines()]
            mine = next(words[0] for words in lines if "myself" in words[2])
            replica = next(words[1].split(",")[1] for words in lines if words[3] == mine)
            self._ask(replica, "CLUSTER", "FAILOVER")
        return self._replaced(*watched)

    def reshard(self) -> None:
        """Move a fifth of every primary's slots to the next one, by valkey-cli, which moves one after the other."""
        ids = [self._ask(each, "CLUSTER", "MYID").strip() for each in self._primaries()]
        for at, id in enumerate(ids):
            target = ids[(at + 1) % len(ids)]
            moved = ("--cluster-from", id, "--cluster-to", target, "--cluster-slots", str(_SLOTS // len(ids) // SHARE))
            self._ask("valkey-1", "--cluster", "reshard", "127.0.0.1:6379", *moved, "--cluster-yes")

    def _servers(self) -> list[str]:
        """The services that hold data."""
        names = self._run("ps", "--services", "--all").split()
        return sorted(name for name in names if re.fullmatch(r"valkey(-\d+)?", name))

    def _primary(self) -> str:
        """The next one of those that are a primary now."""
        servers = self._servers()
        if self.warm_kind == "sentinel":
            return next(each for each in servers if self._ask(each, "ROLE").startswith("master"))
        return servers[0] if len(servers) == 1 else self._primaries()[0]

    def _primaries(self) -> list[str]:
        """The nodes of a cluster that have slots, by their services."""
        lines = [line.split() for line in self._ask("valkey-1", "CLUSTER", "NODES").splitlines()]
        return sorted(words[1].split(",")[1] for words in lines if len(words) > 8)

    def _watched(self, primary: str) -> tuple[str, str] | None:
        """Who is to be asked whether this primary is replaced, and a command of its shell that says so."""
        cli = "REDISCLI_AUTH=$VALKEY_OPERATOR_PASSWORD valkey-cli --user operator"
        if self.warm_kind == "sentinel":
            address = self._ask("sentinel-1", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE).split()[0]
            named = f"{cli} -p 26379 sentinel get-master-addr-by-name {SERVICE} | head -n 1"
            return "sentinel-1", f'[ "$({named})" != {address} ]'
        if self.warm_kind == "cluster":
            other = next(each for each in self._servers() if each != primary)
            mine = self._ask(primary, "CLUSTER", "MYID").strip()
            # Who has no slots any more has a line of eight words.
            return other, f"{cli} cluster nodes | awk '$1 == \"{mine}\" && NF == 8' | grep -q ."
        return None

    def _replaced(self, service: str, condition: str) -> float:
        """Wait for this, in the container, which is asked far more often so than from here; when it came."""
        words = ("timeout", "30", "sh", "-c", f"until {condition}; do sleep {_LOOK}; done")
        self._run("exec", "-T", service, *words)
        return time.monotonic()

    def _ask(self, service: str, *words: str) -> str:
        """What valkey-cli says in the container of a service, as the operator."""
        port = "26379" if service.startswith("sentinel") else "6379"
        command = 'REDISCLI_AUTH=$VALKEY_OPERATOR_PASSWORD exec valkey-cli --user operator -p "$0" "$@"'
        return self._run("exec", "-T", service, "sh", "-c", command, port, *words)
