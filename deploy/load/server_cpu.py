"""What a commit of one field takes of the server's CPU. Law: the server is its own, so that nothing else is counted.

    python -m deploy.load.server_cpu

From INFO commandstats: the time within EVALSHA, which holds the script and every command that it calls.
"""

from __future__ import annotations

from itertools import count

import redis

from distributed_state import StateStore
from distributed_state.programs.servers import redis_binary, redis_server

COMMITS = 500
ROUNDS = 20


def commit_cpu(binary: str | None = None, *, commits: int = COMMITS, rounds: int = ROUNDS) -> float:
    """Microseconds of one `set` on a record that its writer keeps hot, in the best of some rounds.

    The best, because INFO counts what the server waits for a core, too.
    """
    # Without archiver and heartbeat: their scripts are EVALSHA, too.
    settings = {"archive": "memory", "namespace": "cpu", "archiver": False, "beat": 0}
    with redis_server(binary=binary) as server, StateStore.open(server.url, **settings) as store:
        client = redis.Redis.from_url(server.url)
        session = store.session("s")
        numbers = count(1000)
        session.set("number", next(numbers))
        session.get("number")
        taken = []
        for _ in range(rounds):
            client.config_resetstat()
            for _ in range(commits):
                session.set("number", next(numbers))
            stats = client.info("commandstats")["cmdstat_evalsha"]
            taken.append(stats["usec"] / stats["calls"])
            store.admin.archive()  # else the journal would be full in the end
        client.close()
    return min(taken)


if __name__ == "__main__":
    print(f"{redis_binary()}: {commit_cpu():.1f} us of server CPU for a commit of one field")
