"""The warm tier: Redis, its scripts, leases, streams and subscriptions."""
