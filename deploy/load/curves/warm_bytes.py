"""What a session takes in Redis beyond what its user keeps in it, once it is archived: by how much that is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence

import redis

from deploy.load.curves.curve import Curve, Progress
from distributed_state import StateStore
from distributed_state.programs.servers import redis_server

_FIELDS = 10


def state_of(size: int) -> dict[str, str]:
    """Fields of about so many bytes of JSON."""
    return {f"field-{number}": "x" * max(1, size // _FIELDS - 2) for number in range(_FIELDS)}


def warm_bytes(sizes: Sequence[int], progress: Progress) -> Curve:
    """The bytes of a session of ten fields without those of their JSON."""
    costs = []
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="distributed-state-growth-") as folder:
        settings = {"archive": f"sqlite:///{folder}/state.db", "archiver": False}
        with StateStore.open(server.url, **settings) as store, redis.Redis.from_url(server.url) as client:
            for size in sizes:
                progress(f"{size} bytes")
                state = state_of(size)
                store.session(f"session-{size}").set_many(state)
                store.admin.archive()
                (key,) = client.scan_iter(f"*:r:session:session-{size}")
                taken = client.memory_usage(key, samples=0)  # of all fields, not of some
                assert taken
                costs.append(float(int(taken) - sum(len(json.dumps(value)) for value in state.values())))
    return Curve(
        "a session of 10 fields in Redis, beyond its JSON", "bytes", "bytes of JSON", list(sizes), costs, 1_500.0
    )
