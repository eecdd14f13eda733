"""A store behind its HTTP service. Law: a name has the same meaning as in the direct store, or does not exist.

Design: section 26.
"""
