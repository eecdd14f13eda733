"""What conversations cost: long ones, turns, saved states, and windows."""

from __future__ import annotations

import json
from typing import Any

import redis

from deploy.load.rows import Row, at_most, interleaved
from distributed_state import AgentState, Message, StateStore, ToolCall


def long_conversation(url: str, store: StateStore) -> list[Row]:
    message = Message(role="user", content="What is the status of my booking? " * 3)
    short = store.session("short")
    long = store.session("long")
    for session, count in ((short, 40), (long, 10_000)):
        for at in range(0, count, 500):
            session.append(*[message] * min(500, count - at))
    store.admin.archive()
    # Measured as a worker meets it that has nothing hot: each read goes to Redis.
    found = interleaved(
        {
            "append 40": (lambda: short.append(message), 100),
            "append 10000": (lambda: long.append(message), 100),
        },
        rounds=41,
    )
    store.admin.archive()
    found |= interleaved(
        {
            "read 40": (lambda: short.messages(last=20, fresh=True), 50),
            "read 10000": (lambda: long.messages(last=20, fresh=True), 50),
        },
        rounds=31,
    )
    return [
        at_most("append at 10,000 messages", found["append 10000"], found["append 40"], 1.1, "us", "at 40"),
        at_most("messages(last=20) at 10,000", found["read 10000"], found["read 40"], 1.1, "us", "at 40"),
    ]


def turns(url: str, archive: str) -> list[Row]:
    """Round trips as the server counts them: how often it read from a socket. Nothing is hot, so that each counts."""
    settings: dict[str, Any] = {"namespace": "bench-turns", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store, redis.Redis.from_url(url) as client:
        session = store.session("turn")
        session.append({"role": "user", "content": "hello"})

        def turn(number: int) -> None:
            with session.turn(request_id=f"r{number}") as turn:
                turn.messages(last=20)
                for role in ("user", "assistant", "tool", "assistant"):
                    turn.append({"role": role, "content": "text"})
                turn["a"] = number
                turn["b"] = 2
                turn["c"] = 3

        turn(0)
        before = client.info("stats")["total_reads_processed"]
        for number in range(1, 101):
            turn(number)
        trips = (client.info("stats")["total_reads_processed"] - before - 1) / 100
    return [Row("a turn: lease, read, 4 messages, 3 fields", f"{trips:g} round trips", "2 round trips", trips / 2,
                "<= 2 round trips", trips <= 2)]  # fmt: skip


def saving(url: str, archive: str) -> list[Row]:
    """One more message saved, at 10 and at 1,000 messages with half as many tool calls; nothing is hot."""
    settings: dict[str, Any] = {"namespace": "bench-saving", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store:
        states: dict[int, AgentState] = {}
        for count in (10, 1000):
            state = AgentState.from_user_input("question", f"agent-{count}").to_executing()
            for number in range(count // 2 - 1):
                call = ToolCall(tool_name="look", call_id=f"c{number}", arguments={"at": number}, result="x" * 100)
                state = state.record_observation("I look", call)
            states[count] = store.session(f"agent-{count}").save_state(state)

        def save(count: int) -> None:
            state = states[count].with_messages({"role": "assistant", "content": "one more"})
            states[count] = store.session(f"agent-{count}").save_state(state)

        found = interleaved({"10": (lambda: save(10), 20), "1000": (lambda: save(1000), 20)}, rounds=31)
    return [at_most("save_state at 1,000 messages", found["1000"], found["10"], 1.2, "us", "at 10")]


def window(url: str, archive: str) -> list[Row]:
    """What a bounded context reads of a long conversation, in bytes of stored messages."""
    settings: dict[str, Any] = {"namespace": "bench-window", "archiver": False, "max_staleness": 0}
    with StateStore.open(url, archive=archive, **settings) as store:
        session = store.session("long")
        messages = [Message(role=("user", "assistant")[n % 2], content="What is the status? " * 5) for n in range(500)]
        for _ in range(20):
            session.append(*messages)
        store.admin.archive()
        shown = session.window(max_tokens=4000)
        whole = sum(len(json.dumps(message.to_dict(), separators=(",", ":"))) for message in messages) * 20
    return [at_most("window(max_tokens=4000) of 10,000", shown.read_bytes, whole, 0.05, "bytes", "the conversation")]
