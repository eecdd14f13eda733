"""A store behind its HTTP service. Law: a method means the same as in the direct store, or does not exist.

Design: section 26.
"""
