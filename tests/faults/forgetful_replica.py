"""A replica of the demo that does not note an event: the negative control of what the demo verifies."""

from __future__ import annotations

from distributed_state import Event
from distributed_state.programs.demo.replica import DemoAgent, main


class Forgetful(DemoAgent):
    """Forgets that a conversation was cleared, if it is ben."""

    def note_event(self, event: Event, position: str) -> None:
        if self.book.name != "ben" or event.type != "conversation.cleared":
            super().note_event(event, position)


if __name__ == "__main__":
    main(Forgetful)
