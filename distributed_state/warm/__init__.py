"""The warm tier: all that is said to Redis. Law: what has to be atomic is one script.

`scripts` names the scripts and sends them, `answers` has what goes there and comes back. `client` is for records, and
makes it harmless to send a write again; `partitions` is for their journals, `confirming` waits for durability, `clock`
knows the servers' time. `link` hears what is published. `lease` holds a `lock` of the server's, `held_leases` lists
them all. `stream` has the events, `event_channels` where they are published, `consumers` who takes them. `presence`
knows which replicas there are, `partition_assignment` which partitions each handles.

Design: section 4.
"""
