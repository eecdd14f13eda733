"""The cold tier: every record's whole history, in SQL. Law: one transaction moves a cursor and archives its entries.

Design: section 9.
"""
