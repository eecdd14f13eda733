"""The cold tier: the whole history of every record, in SQL. Law: one transaction moves a cursor and what it passes.

Design: section 9.
"""
