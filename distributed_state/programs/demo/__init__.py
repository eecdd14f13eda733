"""Demos for newcomers, in one terminal, which run real servers and verify their own results."""
