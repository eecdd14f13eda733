"""Replay recorded conversations on several workers, kill some, and verify that what was acknowledged was kept."""
