"""A store behind its HTTP service, by the names of the store. Law: a name means here what it means there, or is not.

Design: section 26.
"""
