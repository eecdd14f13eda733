"""The command line; `shell` is where it starts."""

from distributed_state.cli import changing, looking, running
from distributed_state.cli.shell import main

__all__ = ["changing", "looking", "main", "running"]
