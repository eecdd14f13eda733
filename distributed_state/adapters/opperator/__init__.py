"""Agents under an Opperator daemon: `run(MyAgent(store))`, or `distributed-state opperator module:NAME`.

An agent that was written for the daemon's SDK changes only the module that it imports from.
"""

from distributed_state import CommandArgument, LogLevel
from distributed_state.adapters.opperator.agent import (
    CommandExposure,
    OpperatorAgent,
    SecretError,
    SlashCommandScope,
    get_secret,
)
from distributed_state.adapters.opperator.bridge import run

__all__ = [
    "CommandArgument",
    "CommandExposure",
    "LogLevel",
    "OpperatorAgent",
    "SecretError",
    "SlashCommandScope",
    "get_secret",
    "run",
]
