"""What an agent keeps: turns, phases, bounded context, tools, typed state, on top of records."""
