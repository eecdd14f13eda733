#!/usr/bin/env python3
"""Replace the workers of the compose fleet without a failed request.

Start as many new workers as run, from the present image and settings, wait until the /readyz of each new one answers
200, and then drain and stop the old ones, one at a time. If a new one does not get ready, the new ones are removed and
the old ones continue. The range WORKER_PORTS must have a port for each old and each new worker. Run it where you run
`docker compose`, with the same .env and the same COMPOSE_FILE, if you use it:

    docker compose build && docker compose run --rm migrate && deploy/roll.py

Ctrl-C before the first old worker is stopped removes the new ones; later it leaves the new and the remaining old ones.
Exit code 0: only new workers run; 1: refused or interrupted.
"""

# Law: no old worker is stopped before every new one is ready.
# It runs on the host, so it needs nothing but Python 3.9 and docker.
from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

_READY = "from urllib.request import urlopen; urlopen('http://127.0.0.1:9464/readyz', timeout=3)"
_signals: list[int] = []  # received so far


class Failed(Exception):
    """A command of docker failed, a worker does not get ready, or somebody interrupted."""


def say(text: str) -> None:
    print(f"roll: {text}", file=sys.stderr, flush=True)


def docker(*words: str, timeout: float | None = None) -> str:
    """Run a command to its end, also after Ctrl-C: the engine would go on with what a cancelled command began."""
    done = subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        check=False, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"docker {' '.join(words)}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def workers() -> list[str]:
    """The names of the workers that run."""
    ids = docker("compose", "ps", "--quiet", "worker").split()
    return [each.lstrip("/") for each in docker("inspect", "--format", "{{.Name}}", *ids).split()] if ids else []


def remove_stopped() -> None:
    docker("compose", "rm", "--force", "worker")


def ready(name: str) -> bool:
    try:
        docker("exec", name, "python", "-c", _READY, timeout=10)
    except (Failed, subprocess.TimeoutExpired):
        return False
    return True


def start(old: list[str], within: float) -> None:
    """Start as many new workers as there are old ones, and wait until all of them are ready."""
    say(f"running: {len(old)}; starting as many new workers")
    wanted = f"worker={2 * len(old)}"
    docker("compose", "up", "-d", "--no-deps", "--no-recreate", "--scale", wanted, "worker")
    new = [each for each in workers() if each not in old]
    if len(new) != len(old):
        raise Failed(f"{len(new)} of {len(old)} new workers started")
    deadline = time.monotonic() + within
    for each in new:
        say(f"waiting until {each} is ready")
        while not ready(each):
            if _signals:
                raise Failed("interrupted")
            if time.monotonic() > deadline:
                log = subprocess.run(["docker", "logs", "--tail", "10", each], capture_output=True, text=True)
                raise Failed(f"{each} is not ready after {within:g} s; its last lines:\n{log.stdout}{log.stderr}")
            time.sleep(1)
    if _signals:
        raise Failed("interrupted")


def stop(old: list[str]) -> None:
    """Drain and stop one after the other."""
    for each in old:
        if _signals:
            raise Failed("interrupted")
        say(f"draining {each}")
        docker("stop", each)
        code = docker("wait", each).strip()
        if code != "0":
            say(f"{each} ended with exit code {code} instead of 0: it may have been killed with turns running")
    remove_stopped()


def roll(within: float) -> None:
    remove_stopped()  # `up` would start one that has exited again, with its old image
    old = workers()
    if not old:
        raise Failed("no worker runs here. To start some: docker compose up --wait --scale worker=4")
    try:
        start(old, within)
    except Failed as error:
        say(str(error))
        if new := [each for each in workers() if each not in old]:
            docker("stop", *new)
        remove_stopped()
        raise Failed("refused: the new workers were removed, the old ones continue") from error
    say("every new worker is ready; stopping the old ones")
    try:
        stop(old)
    except Failed as error:
        left = " ".join(each for each in workers() if each in old)
        say(f"the new workers continue, and these old ones: {left or 'none'}")
        raise Failed(f"{error}. To finish: docker stop {left} && docker compose rm --force worker") from error
    say(f"done: {len(old)} old workers are replaced")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--within", type=float, default=120.0, metavar="SECONDS", help="until the new workers are ready (120)"
    )
    within = parser.parse_args().within
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, frame: _signals.append(number))
    try:
        roll(within)
    except Failed as error:
        say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
