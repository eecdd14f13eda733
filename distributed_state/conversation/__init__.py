"""Sessions: turns, messages in a window, tools, phases."""
