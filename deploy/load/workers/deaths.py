"""Workers that are killed with sessions in hand, and workers that are restarted under load."""

from __future__ import annotations

import time
from collections.abc import Iterator

from deploy.load.rows import Row, at_most
from deploy.load.workers.handlers import BEGAN, GO, HOLD, NOTE
from deploy.load.workers.posting import Poster, wait_for_answers
from deploy.load.workers.processes import Place, began, said, share
from distributed_state.programs.servers import wait_until

_OTHERS = 2
_ROLLED = 4
_SESSIONS = 100  # among which the inputs are divided
_CALM_SECONDS = 5.0  # of load before the first restart


def answered(wrong: list[str], count: int, what: str) -> Row:
    """Whether each input was answered once."""
    name = f"{what}: sessions with an input lost or answered twice"
    return Row(name, f"{len(wrong)} of {count}", "; ".join(wrong[:2]), len(wrong) / count, "none", not wrong)


def killed(place: Place) -> Iterator[Row]:
    """A worker is killed with sessions in hand; others, which have room for them, begin all of them again."""
    client, namespace, count = place.client(), "killed", place.held
    posted = {f"s{number}": [f"input {number}"] for number in range(count)}
    words = ("--ttl", str(place.ttl), "--concurrency", str(count + 10))
    client.delete(BEGAN, GO)
    with place.open(namespace) as store, place.workers(namespace, *words) as workers:
        (first,) = workers.start()
        for id, (text,) in posted.items():
            store.session(id).post(said(text), handler=HOLD)
        place.show(f"killed: one worker takes {count} sessions")
        wait_until(lambda: client.llen(BEGAN) == count, "the worker does not take all", 60)
        workers.start(_OTHERS)
        time.sleep(place.ttl)  # the others have looked meanwhile, and the leases were renewed
        place.show("killed: others begin them again")
        at = time.time()
        first.process.kill()
        wait_until(lambda: client.llen(BEGAN) >= 2 * count, "the others do not begin all again", 10 * place.ttl)
        again = began(client)[count:]
        client.set(GO, 1)
        wrong = wait_for_answers(store, posted)
    last = max(each.at for each in again) - at
    name = f"{count} sessions of a killed worker begun again, ttl {place.ttl:g} s"
    yield at_most(name, last, place.ttl + 2, 1, "s", "ttl + 2 s")
    yield answered(wrong, count, "killed")


def rolling(place: Place) -> Iterator[Row]:
    """All workers are restarted, one after the other, while inputs come at a constant rate."""
    client, namespace = place.client(), "rolling"
    client.delete(BEGAN)
    with place.open(namespace) as store, place.workers(namespace, "--ttl", str(place.ttl)) as workers:
        running = workers.start(_ROLLED)
        with Poster(store, NOTE, place.rate, _SESSIONS) as poster:
            time.sleep(_CALM_SECONDS)  # until they share the partitions
            calm = time.time()
            time.sleep(_CALM_SECONDS)
            since = time.time()
            for number, each in enumerate(running):
                place.show(f"rolling: {number} of {_ROLLED} workers are restarted")
                each.stop()
                workers.start()
            until = time.time()
        place.show("rolling: reading all sessions")
        wrong = wait_for_answers(store, poster.posted)
        found = began(client)
    before, during = poster.pauses(found, calm, since), poster.pauses(found, since, until)
    name = f"restart of {_ROLLED} workers, {place.rate:g} inputs/s: pause of an input, p99"
    yield at_most(name, share(during, 0.99), 1.0, 1, "s", "the goal")
    longest, calm_ms = f"{max(during):.3g} s of {len(during)} inputs", share(before, 0.99) * 1000
    yield Row("the same, the longest", longest, f"before: p99 {calm_ms:.0f} ms", max(during) / max(before), "", True)
    yield answered(wrong, len(poster.posted), "rolling")
