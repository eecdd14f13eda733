"""What a server was asked to do, told by itself (MONITOR). Law: probes and heartbeats never rest, and are left out."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from below import urls_of
from faces import core

from distributed_state.warm.scripts import PROBE


@dataclass
class Asked:
    """`sent`: commands that came over the wire, `inside`: what scripts called; each as its words in one text."""

    sent: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def publishes(self) -> list[str]:
        """What records told those who hold them; lifecycle events and journals have channels of their own."""
        told = [each for each in self.inside if each.startswith("SPUBLISH ")]
        return [each for each in told if not re.search(r"}:(e[ :]|journal )", each)]


@contextmanager
def round_trips(client: redis.Redis) -> Iterator[list[int]]:
    """How often a server read from a socket while the block ran, in the list after the block.

    The server is to be the test's own: it counts what everybody sends.
    """
    counted: list[int] = []
    before = client.info("stats")["total_reads_processed"]
    yield counted
    # The one more is this question.
    counted.append(client.info("stats")["total_reads_processed"] - before - 1)


@contextmanager
def asked(store: Any, url: str | None = None) -> Iterator[Asked]:
    """What this store's namespace was asked for while the block ran; read it after the block.

    Of a cluster it is all nodes' in one, node by node.
    """
    found, marker = Asked(), uuid.uuid4().hex
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(each)) for each in ([url] if url else urls_of(store))]
        monitors = [stack.enter_context(client.monitor()) for client in clients]
        yield found
        for client, monitor in zip(clients, monitors, strict=True):
            client.echo(marker)
            probe = False
            for each in monitor.listen():
                if marker in each["command"]:
                    break
                if each["client_type"] != "lua":
                    probe = (
                        PROBE.sha.decode() in each["command"] or "Prove a link:" in each["command"]
                    )  # and what this script calls comes right after it
                if not probe:
                    _note(found, core(store).settings.namespace, each)


def _note(found: Asked, namespace: str, each: dict[str, str]) -> None:
    command = each["command"]
    beat = "}:roll" in command or "}:replica:" in command
    # Without a link a replica looks now and then whether it is asked what it remembers.
    beat = beat or command.endswith(":gatherings")
    # A link is made when something is first to be heard at its node, and that is when it comes to it.
    link = command.startswith(("SSUBSCRIBE", "SUNSUBSCRIBE"))
    if f"{namespace}:" in command and not beat and not link:
        (found.inside if each["client_type"] == "lua" else found.sent).append(command)
