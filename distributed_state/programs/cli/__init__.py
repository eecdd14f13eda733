"""The command line; `shell` is where it starts."""

from distributed_state.programs.cli import (
    adopting,
    auditing,
    changing,
    fleet,
    inspecting,
    leases,
    listing,
    looking,
    maintenance,
    moving,
    running,
    searching,
    sending,
    serving,
    showing,
    token,
    top,
)
from distributed_state.programs.cli.shell import main

__all__ = [
    "adopting",
    "auditing",
    "changing",
    "fleet",
    "inspecting",
    "leases",
    "listing",
    "looking",
    "main",
    "maintenance",
    "moving",
    "running",
    "searching",
    "sending",
    "serving",
    "showing",
    "token",
    "top",
]
