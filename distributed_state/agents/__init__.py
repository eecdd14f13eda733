"""Agents: hooks for events, commands, config, and the host that runs them.

Law: agents use only the store's public interface and its services.

Design: section 12.
"""

from distributed_state.agents.asyncio import AsyncAgent, AsyncHost
from distributed_state.agents.blocking import Agent, Host
from distributed_state.agents.display import Limits, LogLevel, Status
from distributed_state.agents.hooks import CommandArgument

__all__ = ["Agent", "AsyncAgent", "AsyncHost", "CommandArgument", "Host", "Limits", "LogLevel", "Status"]
