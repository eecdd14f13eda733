"""The command line. Each module adds its commands to the application in `shell`, whose `main` is the entry point."""

from distributed_state.programs.cli import fleet, maintenance, moving, probe, records, running, work
from distributed_state.programs.cli.shell import main

__all__ = ["fleet", "main", "maintenance", "moving", "probe", "records", "running", "work"]
