"""What an agent keeps: turns, phases, bounded context, tools, typed state, on top of records. And `Agent` itself.

Design: section 12.
"""

from distributed_state.agents.agent import AsyncAgent
from distributed_state.agents.blocking_agent import Agent, Host
from distributed_state.agents.commands import CommandArgument
from distributed_state.agents.display import LogLevel
from distributed_state.agents.host import AsyncHost
from distributed_state.agents.status import Limits, Status

__all__ = ["Agent", "AsyncAgent", "AsyncHost", "CommandArgument", "Host", "Limits", "LogLevel", "Status"]
