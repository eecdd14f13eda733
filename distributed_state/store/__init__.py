"""What a user opens: both faces, and what concerns all records of a store.

Design: section 18.
"""
