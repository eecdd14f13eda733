"""Demos for newcomers, on real servers: the lifecycle, which verifies itself, and a chat to try in a browser."""
