"""The hot tier: this process's cache.

Law: a record never goes back to an older version, and hot answers only while its link is up.

Design: section 7.
"""
