"""The hot tier: what this process remembers. Law: it never goes back in time, and answers only while its link lives.

Design: section 7.
"""
