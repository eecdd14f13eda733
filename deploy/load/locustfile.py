"""The same traffic for teams that use locust: `locust -f deploy/load/locustfile.py --host http://worker:8080`.

locust's users wait for answers, so a server that stalls is asked less: latencies are those of a closed loop, and lower
than what load.py measures. Nothing is read back. CONVERSATIONS names a file of JSON lines.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from locust import FastHttpUser, between, task

from distributed_state.programs.replay.conversations import read_conversations

_FILE = os.environ.get("CONVERSATIONS")
SOURCE = [
    [[message.to_dict() for message in turn] for turn in conversation.turns]
    for conversation in read_conversations(Path(_FILE) if _FILE else None)
]


class Agent(FastHttpUser):
    """Leads one recorded conversation after the other, and looks at it now and then."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        """Begin the first conversation."""
        self.begin()

    def begin(self) -> None:
        """A new conversation, under an id that the worker chooses; refused or unanswered, after a moment again."""
        while (
            answer := self.client.post("/v1/conversations", json={}, name="POST /v1/conversations")
        ).status_code != 201:
            self.wait()
        self.id = answer.json()["id"]
        self.turn = 0
        self.turns = random.choice(SOURCE)

    @task(3)
    def say(self) -> None:
        """The next turn, under its own request id."""
        if self.turn == len(self.turns):
            self.begin()
        given = {"request_id": f"turn {self.turn}", "messages": self.turns[self.turn]}
        path = f"/v1/conversations/{self.id}/turns"
        with self.client.post(
            path, json=given, name="POST /v1/conversations/{id}/turns", catch_response=True
        ) as answer:
            if answer.status_code == 200:
                self.turn += 1
            else:
                answer.failure(str(answer.status_code))  # the same turn again: it is written once

    @task(1)
    def look(self) -> None:
        """The last messages, as a user interface reads them."""
        self.client.get(f"/v1/conversations/{self.id}?last=20", name="GET /v1/conversations/{id}")

    @task(1)
    def browse(self) -> None:
        """The first page of all conversations."""
        self.client.get("/v1/conversations?limit=20", name="GET /v1/conversations")
