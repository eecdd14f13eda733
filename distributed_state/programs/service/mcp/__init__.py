"""The Model Context Protocol, as one more operation of the service; needs the extra `mcp`."""

from distributed_state.programs.service.mcp.endpoint import operation

__all__ = ["operation"]
