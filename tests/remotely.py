"""Workers of the service for tests of the remote store. Law: they are processes, as in production."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from below import ROOT


class Serving:
    """`distributed-state serve` of a store at this place, as a process that is started when its `url` is asked for."""

    def __init__(self, place: Mapping[str, str], *words: str) -> None:
        self._place = place
        self._words = words
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    def start(self) -> Self:
        """Start it; several start side by side."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # Not as words: a password would stand in the list of processes.
        told = {f"DISTRIBUTED_STATE_{name.upper()}": value for name, value in self._place.items()}
        command = [sys.executable, "-m", "distributed_state", "serve", "--port", "0", "--notice", "0.05", *self._words]
        environment = os.environ | {"PYTHONPATH": path} | told
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        return self

    @property
    def url(self) -> str:
        """Where it serves."""
        if not self._url:
            process = self._process or self.start()._process
            assert process is not None
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "serving on " in line, f"{line} {process.communicate(timeout=20)}"
            self._url = json.loads(line)["message"].split()[-1]
        return self._url

    def kill(self) -> None:
        """End it as the machine would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
