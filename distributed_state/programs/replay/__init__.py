"""Replay recorded conversations on several workers, kill some, and verify that no acknowledged write was lost."""
