"""What only a process of its own can show."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distributed_state.adapters.opperator import wire

PRINTS = """
import os, runpy, sys
from contextlib import nullcontext
if sys.argv[1] == "ours":
    streams = runpy.run_path(sys.argv[2])["standard_streams"]()
else:
    streams = nullcontext((sys.stdin.buffer, sys.stdout.buffer))
with streams as (source, target):
    os.system("cat; echo a child")
    print("printed", flush=True)
    os.write(target.fileno(), b"a message, and " + os.read(source.fileno(), 100))
print("after")
"""


@pytest.mark.parametrize(
    ("whose", "out", "err"),
    [
        ("ours", "a message, and what was said\nafter\n", "a child\nprinted\n"),
        # The negative control: without it, all is mixed, and a child takes what was said to us.
        ("everybody's", "what was said\na child\nprinted\na message, and after\n", ""),
    ],
)
def test_what_others_print_and_read_is_apart(whose: str, out: str, err: str) -> None:
    command = [sys.executable, "-c", PRINTS, whose, wire.__file__]
    done = subprocess.run(command, input="what was said\n", capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (out, err, 0)


def test_the_core_does_not_bring_what_http_needs() -> None:
    others = "{'starlette', 'uvicorn', 'prometheus_client'}"
    code = f"import sys, distributed_state, distributed_state.programs.cli; print({others} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
