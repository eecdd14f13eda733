"""What an agent keeps: turns, phases, bounded context, tools, typed state, on top of records. And `Agent` itself."""

from distributed_state.agent.agents import AsyncAgent
from distributed_state.agent.blocking_agents import Agent, Host
from distributed_state.agent.commands import CommandArgument
from distributed_state.agent.health import Limits, Status
from distributed_state.agent.hosting import AsyncHost
from distributed_state.agent.visible import LogLevel

__all__ = ["Agent", "AsyncAgent", "AsyncHost", "CommandArgument", "Host", "Limits", "LogLevel", "Status"]
