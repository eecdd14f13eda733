"""The warm tier: all that is said to Redis. Law: what has to be atomic is one script.

Design: section 4.
"""
