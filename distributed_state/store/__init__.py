"""What a user opens: both faces, and what concerns all records of a store. Law: what a face offers is written once.

Design: section 18.
"""
