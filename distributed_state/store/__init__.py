"""The store that a user opens, in the asyncio and the blocking API. Law: each feature of an API is written once.

Design: section 18.
"""
