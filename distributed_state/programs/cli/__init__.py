"""The command line: each module adds its commands to the one of `shell`, where it starts."""

from distributed_state.programs.cli import fleet, maintenance, records, running
from distributed_state.programs.cli.shell import main

__all__ = ["fleet", "main", "maintenance", "records", "running"]
