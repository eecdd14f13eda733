"""Pages for inspecting and controlling a store in a browser. Law: they show only the answers of the HTTP interface."""

from distributed_state.programs.inspector.app import PATH, inspector
from distributed_state.programs.inspector.pages import Tickets

__all__ = ["PATH", "Tickets", "inspector"]
