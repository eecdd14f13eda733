"""Run an agent under an Opperator daemon: `run(MyAgent(store))`, or `distributed-state opperator module:MyAgent`."""

from distributed_state.adapters.opperator.bridge import run

__all__ = ["run"]
