"""Frozen values and their bytes: keys, codec, encryption, journal. Law: nothing here asks anybody.

Design: section 3.
"""
