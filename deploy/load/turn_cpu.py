"""What a turn takes of its worker's CPU, beside redis-py that sends the same commands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import redis

from deploy.load import baseline
from deploy.load.rows import Row, at_most
from distributed_state import StateStore


def turn_cpu(url: str) -> list[Row]:
    """What a turn takes of the CPU of its worker: two messages and a field, beside redis-py with the same commands."""
    messages = [{"role": role, "content": "What is the status of my booking? " * 3} for role in ("user", "assistant")]
    commands = baseline.commands(url, messages)
    ours, bare = _cpu_of_one_after_the_other(url, messages, commands)
    many = baseline.compared(url, 1, messages, commands, rounds=5)
    versus = "redis-py, the same commands"
    return [
        at_most("CPU of a turn in the worker", ours, bare, 1.4, "us", versus),
        at_most(
            f"CPU of a turn, asyncio, {baseline.TASKS} tasks", many["library"].cpu_us,
            many["redis-py on asyncio"].cpu_us, 1.4, "us", versus,
        ),
    ]  # fmt: skip


def _cpu_of_one_after_the_other(url: str, messages: baseline.Messages, commands: baseline.Commands) -> Iterator[float]:
    """Microseconds of CPU of a blocking turn, ours and redis-py's, in turn, medians."""
    client = redis.Redis.from_url(url)
    bare = partial(baseline.bare_turn, client, baseline.loaded(client, commands))
    given: dict[str, Any] = {"archive": "memory", "archiver": False, "beat": 0}
    with StateStore.open(url, namespace="bench-turn-cpu", **given) as store:
        sessions = [store.session(f"s{number}") for number in range(baseline.SESSIONS)]
        for number, session in enumerate(sessions):
            baseline.turn(session, -1 - number, messages)
        numbers = count()
        taken: dict[str, list[float]] = {"ours": [], "bare": []}
        for _ in range(15):
            for name, paces in taken.items():
                used = time.process_time()
                for _ in range(200):
                    number = next(numbers)
                    if name == "ours":
                        baseline.turn(sessions[number % baseline.SESSIONS], number, messages)
                    else:
                        bare(f"cpu-{number % baseline.SESSIONS}")
                paces.append((time.process_time() - used) / 200 * 1e6)
    return map(statistics.median, taken.values())
