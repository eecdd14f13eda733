"""Agents: hooks for what happens, commands, config, and the host that runs them. Law: they stand on the public store.

Design: section 12.
"""

from distributed_state.agents.agent import AsyncAgent
from distributed_state.agents.blocking_agent import Agent, Host
from distributed_state.agents.commands import CommandArgument
from distributed_state.agents.display import LogLevel
from distributed_state.agents.host import AsyncHost
from distributed_state.agents.status import Limits, Status

__all__ = ["Agent", "AsyncAgent", "AsyncHost", "CommandArgument", "Host", "Limits", "LogLevel", "Status"]
