"""Reads and changes of one record, through a handle. Law: a method is one read or one commit.

Design: sections 4, 6.
"""
