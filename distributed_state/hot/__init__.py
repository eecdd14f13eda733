"""The hot tier: this process's cache. Law: it never goes back in time, and answers only while its link lives.

Design: section 7.
"""
