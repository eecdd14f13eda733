"""What a server was asked to do, told by itself (MONITOR). Law: probes and heartbeats never rest, and are left out."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from below import urls_of
from sync_api import core

from distributed_state.tiers.unarchived import UnarchivedCommits
from distributed_state.warm.scripts import PROBE

_counting = threading.RLock()  # held by a test that counts, or by the look that it waits for
_look = UnarchivedCommits.look


async def _look_unless_counted(self: UnarchivedCommits) -> None:
    """As `look`, but the job that drops archived commits skips it while a test counts.

    A caller's look sends the same commands, and counts.
    """
    if threading.current_thread().name != "distributed-state-unarchived":
        await _look(self)
    elif _counting.acquire(blocking=False):
        try:
            await _look(self)
        finally:
            _counting.release()


UnarchivedCommits.look = _look_unless_counted  # type: ignore[method-assign]


@dataclass
class Asked:
    """`sent`: commands that came over the wire, `inside`: what scripts called; each as its words in one text.

    `others` came over the wire, too: what no caller of the store sent.
    """

    sent: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def publishes(self) -> list[str]:
        """What records told those who hold them; lifecycle events and journals have channels of their own."""
        told = [each for each in self.inside if each.startswith("SPUBLISH ")]
        return [each for each in told if not re.search(r"}:(e[ :]|journal )", each)]


@contextmanager
def round_trips(store: Any) -> Iterator[list[int]]:
    """How often a server read from a socket what this store's callers sent while the block ran, in the list after it.

    The server is to be the test's own: it counts what everybody sends, and says what that was. Heartbeats, probes and
    what comes over a link are taken off, a command as one read.
    """
    counted: list[int] = []
    (url,) = urls_of(store)
    with redis.Redis.from_url(url) as client, asked(store) as seen:
        before = client.info("stats")["total_reads_processed"]
        yield counted
        after = client.info("stats")["total_reads_processed"]
    first, last = (at for at, command in enumerate(seen.others) if command == "INFO stats")
    # The second of them counts itself.
    counted.append(after - before - (last - first))


@contextmanager
def asked(store: Any, url: str | None = None) -> Iterator[Asked]:
    """What this store's namespace was asked for while the block ran; read it after the block.

    Of a cluster it is all nodes' in one, node by node.
    """
    found, marker = Asked(), uuid.uuid4().hex
    with ExitStack() as stack:
        stack.enter_context(_counting)
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
                _note(found, core(store).settings.namespace, each, probe)


def _note(found: Asked, namespace: str, each: dict[str, str], probe: bool) -> None:
    command = each["command"]
    beat = "}:roll" in command or "}:replica:" in command
    # Without a link a replica looks now and then whether it is asked what it remembers.
    beat = beat or command.endswith(":gatherings")
    # A link is made when something is first to be heard at its node, and that is when it comes to it.
    link = command.startswith(("SSUBSCRIBE", "SUNSUBSCRIBE"))
    counts = f"{namespace}:" in command and not beat and not link and not probe
    if each["client_type"] != "lua":
        if counts:
            found.sent.append(command)
        else:
            found.others.append(command)
    elif counts:
        found.inside.append(command)
