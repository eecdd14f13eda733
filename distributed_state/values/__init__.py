"""Frozen values and their bytes: keys, codec, encryption, journal. Law: nothing here accesses a server.

Design: section 3.
"""
