"""What the processes do that tests start and kill (`below.Worker`). Law: one line on stdout per thing that happened."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from distributed_state import AgentState, AsyncStateStore, Locked, StateError, StateStore, Workflow, tool
from distributed_state.store.blocking import Admin
from distributed_state.tiers import commit as write_path


def say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201 - the pipe to the test


def hold(id: str, ttl: float, wait: float = 10.0, **settings: Any) -> None:
    """Take a lock and never give it back."""
    store = StateStore.open(**settings)
    say("opened")
    lease = store.session(id).lock(ttl=ttl, wait=wait).acquire()
    say(lease.token)
    sys.stdin.readline()


def recover(id: str, seconds: float, **settings: Any) -> None:
    """Meet a Redis that lost something, and take so long in the middle of putting it together with SQL."""
    with StateStore.open(**settings) as store:
        partitions = store._core._lifecycle.tiers().warm.partitions
        install = partitions.install

        async def slowly(*given: Any, **named: Any) -> str:
            say("inside")
            time.sleep(seconds)
            return await install(*given, **named)

        partitions.install = slowly  # type: ignore[method-assign]
        say("opened")
        sys.stdin.readline()
        say(store.session(id).set("n", 1))
        recovery = store._core._lifecycle.tiers().recovery
        say(recovery.count + recovery.complete)


def agent(id: str, die: bool, **settings: Any) -> str | None:
    """Run an agent of two steps; be killed in the second, or return its answer."""

    def reflect(state: AgentState, turn: Any) -> AgentState:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        return state.to_done("done")

    steps = {"planning": lambda state, turn: state.to_executing().to_reflecting(), "reflecting": reflect}
    with StateStore.open(**settings) as store:
        return store.run(Workflow(steps), "go", session_id=id, request_id="r").final_answer


def visit(id: str, user: str, request_id: str, **settings: Any) -> None:
    """Let a tool change a session and its user; be killed between the two commits."""
    commit = write_path.commit

    async def and_die(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        if keys.ref.scope == "user":
            os.kill(os.getpid(), signal.SIGKILL)
        return await commit(tiers, keys, draft, **more)

    @tool
    def call(state: dict[str, Any], user_state: dict[str, Any]) -> None:
        state["visits"] = user_state["visits"] = 1

    write_path.commit = and_die  # type: ignore[assignment]
    with StateStore.open(**settings) as store, store.session(id, user=user).turn(request_id=request_id) as turn:
        turn.call(call)
        turn.outcome = {"version": 1}


def write(ids: list[str], **settings: Any) -> None:
    """Append to sessions in turn until a line comes; an acknowledged message is printed."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    with StateStore.open(**settings) as store:
        say("opened")
        for number in itertools.count():
            id = ids[number % len(ids)]
            message = {"role": "user", "content": f"{id} {store.replica} {number}"}
            version = store.session(id).write(append=[message], phase=f"p{number % 2}").version
            say(f"{id} {version} {store.replica} {number}")
            if number % 5 == 0:
                store.emit("crew.wrote", {"number": number}, subject=store.session(id))
            if stop.wait(0.001):
                return


def serve(ids: list[str], me: int, api: str, **settings: Any) -> None:
    """Commit, and read and write under locks, until a line comes; what was acknowledged is printed, and what was not.

    `ack <id> <version> <seconds>`, `locked <id>`, `failed <id> <error>`: seconds of the clock that all processes share.
    """
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    if api == "asyncio":
        asyncio.run(_serve(ids, me, stop, settings))
        return
    with StateStore.open(**settings) as store:
        say("opened")
        for number in itertools.count():
            id = ids[number % len(ids)]
            session = store.session(id)
            try:
                version = session.write(set={f"of {me}": number}, increment={"n": 1}).version
                say(f"ack {id} {version} {time.monotonic()}")
                if number % 7 == 0:
                    with session.lock(ttl=10, wait=30):
                        version = session.set("locked", session.get("locked", 0) + 1)
                    say(f"ack {id} {version} {time.monotonic()}\nlocked {id}")
                    say(f"event {store.emit('crew.wrote', {'number': number}, subject=session).id}")
            except Locked:
                pass
            except StateError as error:
                say(f"failed {id} {error!r}")
            if stop.wait(0.002):
                return


async def _serve(ids: list[str], me: int, stop: threading.Event, settings: dict[str, Any]) -> None:
    async with AsyncStateStore.open(**settings) as store:
        say("opened")

        async def one(id: str) -> None:
            session = store.session(id)
            for number in itertools.count():
                try:
                    version = (await session.write(set={f"of {me}": number}, increment={"n": 1})).version
                    say(f"ack {id} {version} {time.monotonic()}")
                    if number % 7 == 0:
                        async with session.lock(ttl=10, wait=30):
                            version = await session.set("locked", await session.get("locked", 0) + 1)
                        say(f"ack {id} {version} {time.monotonic()}\nlocked {id}")
                except Locked:
                    pass
                except StateError as error:
                    say(f"failed {id} {error!r}")
                if stop.is_set():
                    return
                await asyncio.sleep(0.005)

        await asyncio.gather(*map(one, ids))


def archive(**settings: Any) -> None:
    """Archive until killed."""
    store = StateStore.open(**settings)
    say("opened")
    while True:
        say(store.admin.archive())


def repair(at: int | None, **settings: Any) -> None:
    """Run the command; be killed before its call `at` of a server, or behind it. The background's calls count, too."""
    for name, value in settings.items():
        os.environ[f"DISTRIBUTED_STATE_{name.upper()}"] = str(value)
    from distributed_state.programs import cli

    calls = itertools.count()
    begun = Admin.repair

    def counting(admin: Admin, **given: Any) -> Any:
        port = admin._core._lifecycle.tiers().port
        for name in ("sql", "script", "scripts", "command", "commands", "command_with"):
            setattr(port, name, counted(getattr(port, name)))
        return begun(admin, **given)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        async def made(*arguments: Any) -> Any:
            number = next(calls)
            if number * 2 == at:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = await call(*arguments)
            if number * 2 + 1 == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return made

    Admin.repair = counting  # type: ignore[method-assign]
    sys.argv = ["distributed-state", "repair"]
    cli.main()


def present(**settings: Any) -> None:
    """Be there; leave when a line comes."""
    with StateStore.open(**settings) as store:
        store.admin.replicas()
        say(store.replica)
        sys.stdin.readline()
    say("left")
    sys.stdin.readline()


def opened(**settings: Any) -> None:
    """Wait for a line, open, write one commit and close."""
    say("ready")
    sys.stdin.readline()
    with StateStore.open(**settings) as store:
        say(store.session("shared").increment("n"))


def count(id: str, me: int, rounds: int, **settings: Any) -> None:
    """Set keys of its own and increment a common field, as fast as it can; prints the versions of all its commits."""
    with StateStore.open(**settings) as store:
        say("opened")
        sys.stdin.readline()
        session, versions = store.session(id), list[int]()
        for number in range(rounds):
            versions.append(session.set(f"{me}-{number}", number))
            versions.append(session.write(increment={"n": 1}).version)
        say(json.dumps(versions))


def listen(**settings: Any) -> None:
    """Print each event: its partition, sequence and id; a resync as its reason."""
    with StateStore.open(**settings) as store, store.events() as events:
        say("opened")
        for event in events:
            say(f"{event.partition} {event.sequence} {event.id}" if event.id else f"resync {event.data['reason']}")


def share(group: str, pause: float, **settings: Any) -> None:
    """Handle a group's events, each for a while, and print what was handled."""
    with StateStore.open(**settings) as store, store.events(group=group) as events:
        say("opened")
        for event in events:
            time.sleep(pause)
            say(f"{event.id} {event.subject} {event.data['n']}")


if __name__ == "__main__":
    function: Callable[..., None] = globals()[sys.argv[1]]
    function(**json.loads(os.environ["ARGUMENTS"]))
