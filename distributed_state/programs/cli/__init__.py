"""The command line; `shell` is where it starts."""

from distributed_state.programs.cli import auditing, changing, looking, running, serving, showing, telling
from distributed_state.programs.cli.shell import main

__all__ = ["auditing", "changing", "looking", "main", "running", "serving", "showing", "telling"]
