"""The store's two faces and what concerns all of its records."""
