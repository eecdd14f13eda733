"""Pages on which a store is looked at and steered in a browser. Law: they show what the interface answers, no more."""

from distributed_state.programs.inspector.app import PATH, inspector
from distributed_state.programs.inspector.pages import Tickets

__all__ = ["PATH", "Tickets", "inspector"]
