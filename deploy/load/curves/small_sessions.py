"""What a small session takes in Redis, whoever wrote it. Law: as a server with its default settings counts it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

import redis

from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_IDS = 20
# 170 bytes as JSON; no value is longer than 64 bytes, which is what Redis keeps in a list (hash-max-listpack-value).
STATE = {
    "step": 1,
    "status": "waiting",
    "plan": ["search", "book", "pay"],
    "booking": {"id": "HX7Q2", "from": "BOS", "to": "DEN", "seats": [1]},
    "note": "prefers an aisle seat",
}


def bytes_of_sessions(url: str, archive: str, namespace: str, replicas: int) -> list[int]:
    """The bytes of each of some sessions that so many replicas wrote, one after the other, once they are archived."""
    ids = [f"conversation-{number:06}" for number in range(_IDS)]
    settings = {"namespace": namespace, "archive": archive, "archiver": False}
    with ExitStack() as stack:
        stores = [stack.enter_context(StateStore.open(url, **settings)) for _ in range(replicas)]
        for id in ids:
            for number, store in enumerate(stores):
                session = store.session(id, user="user-1")
                session.set_many(STATE | {"step": number})
        stores[0].admin.archive()
        client = stack.enter_context(redis.Redis.from_url(url))
        found = [client.memory_usage(key) for key in client.scan_iter(f"{namespace}:*:r:session:*")]
    return [int(each) for each in found if each]


def small_sessions(sizes: Sequence[int], progress: Progress) -> Curve:
    """The largest of the sessions that so many replicas wrote."""
    costs = []
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        for size in sizes:
            progress(f"{size} replicas")
            found = bytes_of_sessions(server.url, f"sqlite:///{folder}/{size}.db", f"small-{size}", size)
            costs.append(float(max(found)))
    return Curve("bytes of a session of 170 bytes", "bytes", "replicas wrote it", list(sizes), costs, 400)
