"""The other side of an agent's wire: an Opperator daemon, as far as its agents see it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from below import ROOT, hidden

from distributed_state.adapters.opperator import run


class Daemon:
    """Says things to one agent, and collects what it says; all of that has to be messages."""

    def __init__(self, stdin: Any, stdout: Any) -> None:
        self._stdin, self._stdout = stdin, stdout
        self.messages: list[dict[str, Any]] = []
        self._numbers, self._came = itertools.count(1), threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            with self._came:
                self.messages.append(json.loads(line))
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def say(self, line: str | bytes) -> None:
        self._stdin.write(line if isinstance(line, bytes) else line.encode() + b"\n")
        self._stdin.flush()

    def send(self, type: str, **data: Any) -> None:
        self.say(json.dumps({"type": type, "timestamp": "2026-01-01T00:00:00Z", "data": data}))

    def tell(self, event_type: str, **data: Any) -> None:
        self.send("lifecycle_event", event_type=event_type, data=data)

    def command(self, name: str, args: Any = None, **more: Any) -> str:
        """Send a command and return its id."""
        id = f"{next(self._numbers)}"
        self.send("command", command=name, id=id, **({} if args is None else {"args": args}), **more)
        return id

    def answer(self, id: str, seconds: float = 20) -> dict[str, Any]:
        return self.until("response", lambda data: data.get("command_id") == id, seconds)

    def ask(self, name: str, args: Any = None, **more: Any) -> Any:
        """The result of a command."""
        answer = self.answer(self.command(name, args, **more))
        assert answer["success"], answer
        return answer.get("result")

    def until(self, type: str, wanted: Callable[[dict[str, Any]], bool] = bool, seconds: float = 20) -> dict[str, Any]:
        """The data of the first message of a type that is as wanted."""
        end = time.monotonic() + seconds
        with self._came:
            while True:
                for data in self.of(type):
                    if wanted(data):
                        return data
                left = end - time.monotonic()
                assert left > 0, f"no such {type} within {seconds} s, but {self.messages}"
                assert not self._ended, f"it ended without such {type}, with {self.messages}"
                self._came.wait(left)

    def of(self, type: str) -> list[dict[str, Any]]:
        return [each["data"] for each in self.messages if each["type"] == type]

    def hooks(self, *kinds: str) -> list[tuple[Any, ...]]:
        """The hooks that ran, as the agent told in its log."""
        told = [data["fields"] for data in self.of("log") if data["message"] == "hook"]
        return [(each["hook"], *each["given"]) for each in told if not kinds or each["hook"] in kinds]

    def hook(self, *hook: Any) -> None:
        """Wait until a hook ran."""
        self.until("log", lambda _: hook in self.hooks())

    def hang_up(self) -> None:
        self._stdin.close()


class Process(Daemon):
    """A daemon with `distributed-state opperator` as a process."""

    def __init__(self, opener: Any, agent: str, *options: str, stdout: int = subprocess.PIPE) -> None:
        place, environment = hidden("--url", opener.url, "--archive", opener.archive, "--namespace", opener.namespace)
        words = [*place, "opperator", f"opperator_agent:{agent}", *options]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "distributed_state", *words],
            stdin=subprocess.PIPE, stdout=stdout, stderr=self._errors,
            env=os.environ | environment | {"PYTHONPATH": path},
        )  # fmt: skip
        super().__init__(self.process.stdin, self.process.stdout or [])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(40)
        self._reader.join(10)
        return code

    def errors(self) -> str:
        """What it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for file in (self.process.stdin, self.process.stdout, self._errors):
            if file is not None:
                file.close()


class Here(Daemon):
    """A daemon whose agent runs in a thread of this process."""

    def __init__(self, agent: Any, client: str = "daemon") -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._files = [os.fdopen(theirs_in, "rb", buffering=0), os.fdopen(theirs_out, "wb", buffering=0)]
        self.failed: BaseException | None = None
        self.agent = agent
        self._runner = threading.Thread(target=self._run, args=(client,), daemon=True)
        super().__init__(os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb"))

    def _run(self, client: str) -> None:
        try:
            run(self.agent, *self._files, client=client)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failed = error
        finally:
            self._files[1].close()

    def __enter__(self) -> Here:
        self._runner.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._stdin.closed:
            self.hang_up()
        self._runner.join(30)
        assert not self._runner.is_alive()
        self._reader.join(10)
        self._stdout.close()
        self._files[0].close()


@contextmanager
def started(folder: Path, *words: str, **environment: str) -> Iterator[tuple[Daemon, subprocess.Popen[bytes]]]:
    """A process in this folder, on a store in memory, with a daemon at its pipes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    given = {"PYTHONPATH": path, "DISTRIBUTED_STATE_ARCHIVE": "memory", **environment}
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", *words], cwd=folder, env=os.environ | given,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    daemon = Daemon(process.stdin, process.stdout)
    try:
        yield daemon, process
    finally:
        process.kill()
        process.wait()
        daemon._reader.join(10)
        for pipe in (process.stdin, process.stdout):
            pipe.close()  # type: ignore[union-attr]
