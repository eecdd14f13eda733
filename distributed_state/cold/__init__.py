"""The cold tier: the whole history of every record, in SQL."""
