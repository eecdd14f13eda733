"""The command line: each module adds its commands to the one of `shell`, where it starts."""

from distributed_state.programs.cli import changing, fleet, maintenance, moving, reading, running, token
from distributed_state.programs.cli.shell import main

__all__ = ["changing", "fleet", "main", "maintenance", "moving", "reading", "running", "serving", "token"]
