"""The demo `chat`, started as its user starts it. Law: it has ended with its `with` block, and no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def chatting(*, pause: float) -> Iterator[str]:
    """The link that the command prints. At the end it is interrupted, as by Ctrl-C."""
    words = [sys.executable, "-u", "-m", "distributed_state", "demo", "chat", "--pause", str(pause)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            errors.seek(0)
            assert said.startswith("open http://127.0.0.1:"), said + errors.read()
            yield said.removeprefix("open ").strip()
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 3, "two workers and a server"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            errors.seek(0)
            text = errors.read()
            assert process.returncode == 0, text
            assert "Traceback" not in text, text
            assert " ended with " not in text, "a worker too ends with 0"
            assert psutil.wait_procs(children, timeout=5)[1] == []
        finally:
            process.kill()
            process.wait()
