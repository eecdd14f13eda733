"""Sessions: turns, messages in a window, tools, phases, workflows. Law: a turn is one commit, or nothing.

Design: section 13.
"""
