"""The command `work`: serves the sessions of a store's handlers, in one process or in several.

Law: after SIGTERM or Ctrl-C no further turn begins, and those that run may end. A process that dies is replaced.

Design: sections 28, 31.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from inspect import iscoroutine
from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.errors import InvalidValue
from distributed_state.programs.cli.shell import app, named
from distributed_state.programs.logs import report

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN_SECONDS = 1.0
_AT_ONCE_SECONDS = 5.0  # a process that fails within this time would fail again


@app.command()
def work(
    store: Annotated[
        str, typer.Argument(help="The store with its handlers, or a function that returns it, as module:NAME.")
    ],
    concurrency: Annotated[int, typer.Option(min=1, help="How many turns run at once in each process.")] = 32,
    processes: Annotated[int, typer.Option(min=1, help="How many processes.")] = 1,
    ttl: Annotated[
        float, typer.Option(min=1.0, help="Seconds until others serve the sessions of a dead worker.")
    ] = 30.0,
    max_attempts: Annotated[int, typer.Option(min=1, help="Failures in a row until a session is stuck.")] = 8,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for which running turns may go on at the end.")
    ] = 30.0,
) -> None:
    """Serve the sessions whose handlers a store has, until SIGTERM or Ctrl-C. Several workers divide them among them.

    The module opens its store itself, as `store = AsyncStateStore.open()`: with the servers of the environment.

    Example: [cyan]distributed-state work my_agents:store --processes 4[/]
    """
    if processes > 1:
        raise typer.Exit(_several(processes, shutdown_timeout))
    options: dict[str, Any] = {"ttl": ttl, "max_attempts": max_attempts, "shutdown_timeout": shutdown_timeout}
    found = _store(store)
    if isinstance(found, distributed_state.AsyncStateStore):
        asyncio.run(_awaited(found, concurrency=concurrency, **options))
    else:
        with found:
            _on_signals(found)
            report("working")
            found.work(concurrency=concurrency, **options)
    report("stopped")


def _store(place: str) -> Any:
    found = named(place)
    made = found() if callable(found) else found
    if isinstance(made, (distributed_state.AsyncStateStore, distributed_state.StateStore)):
        return made
    if iscoroutine(made):
        made.close()
    raise InvalidValue(
        f"{place!r} is an object of type {type(made).__name__}: name a store, or a function that returns one"
    )


async def _awaited(store: Any, **options: Any) -> None:
    async with store:
        _on_signals(store)
        report("working")
        await store.work(**options)


def _on_signals(store: Any) -> None:
    """Stop working at the first signal; a second Ctrl-C interrupts.

    A second SIGTERM does not: systemd sends one to each process of a service, and the first process another one.
    """
    received: list[int] = []

    def receive(number: int, _: Any) -> None:
        if received:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        received.append(number)
        store.stop_working()

    for each in _SIGNALS:
        signal.signal(each, receive)


def _several(processes: int, shutdown_timeout: float) -> int:
    """Run the same command in several processes, and replace those that die; return the exit code."""
    words = [sys.executable, "-m", "distributed_state", *_alone(sys.argv[1:])]

    def start() -> tuple[subprocess.Popen[bytes], float]:
        # In a group of its own: Ctrl-C reaches this process alone, which ends the others once.
        return subprocess.Popen(words, process_group=0), time.monotonic()

    started = [start() for _ in range(processes)]
    stopping: list[float] = []
    for each in _SIGNALS:
        signal.signal(each, lambda *_: stopping.append(time.monotonic()))
    while not stopping:
        for at, (process, since) in enumerate(started):
            if process.poll() is None:
                continue
            if process.returncode > 0 and time.monotonic() - since < _AT_ONCE_SECONDS:
                report(f"process {process.pid} ended at once with exit code {process.returncode}")
                stopping.append(time.monotonic())
                break
            report(f"process {process.pid} ended with exit code {process.returncode}; another one begins")
            time.sleep(_AGAIN_SECONDS)
            started[at] = start()
        time.sleep(0.1)
    running = [process for process, _ in started]
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    end = stopping[0] + shutdown_timeout + 10.0
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    report("stopped")
    # One that was still starting says by its exit code that it got the signal.
    return int(any(process.returncode not in (0, 128 + signal.SIGTERM) for process in running))


def _alone(words: list[str]) -> list[str]:
    """The words of the command line without the number of processes."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("--processes="):
            skip = False
        elif word == "--processes":
            skip = True
        else:
            kept.append(word)
    return kept
