"""The hot tier: records kept in this process."""
