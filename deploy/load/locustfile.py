"""The same traffic for teams that use locust: `locust -f deploy/load/locustfile.py --host http://worker:8080`.

locust's users wait for answers, so a server that stalls is asked less: latencies are those of a closed loop, and lower
than what load.py measures. Nothing is read back. CONVERSATIONS names a file of JSON lines, and
DISTRIBUTED_STATE_TOKEN_FILE one with a token.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from locust import FastHttpUser, between, task

from distributed_state.programs.replay.coordinator import read_conversations

_FILE = os.environ.get("CONVERSATIONS")
_TOKEN = os.environ.get("DISTRIBUTED_STATE_TOKEN_FILE")
HEADERS = {"Authorization": f"Bearer {Path(_TOKEN).read_text().strip()}"} if _TOKEN else {}
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
        while (answer := self._create()).status_code != 201:
            self.wait()
        self.id = answer.json()["id"]
        self.turn = 0
        self.turns = random.choice(SOURCE)

    def _create(self) -> Any:
        return self.client.post("/v1/conversations", json={}, headers=HEADERS, name="POST /v1/conversations")

    @task(3)
    def say(self) -> None:
        """The next turn, under its own request id."""
        if self.turn == len(self.turns):
            self.begin()
        given = {"request_id": f"turn {self.turn}", "messages": self.turns[self.turn]}
        path = f"/v1/conversations/{self.id}/turns"
        name = "POST /v1/conversations/{id}/turns"
        with self.client.post(path, json=given, headers=HEADERS, name=name, catch_response=True) as answer:
            if answer.status_code == 200:
                self.turn += 1
            else:
                answer.failure(str(answer.status_code))  # the same turn again: it is written once

    @task(1)
    def look(self) -> None:
        """The last messages, as a user interface reads them."""
        self.client.get(f"/v1/conversations/{self.id}?last=20", headers=HEADERS, name="GET /v1/conversations/{id}")

    @task(1)
    def browse(self) -> None:
        """The first page of all conversations."""
        self.client.get("/v1/conversations?limit=20", headers=HEADERS, name="GET /v1/conversations")
