"""The warm tier: all communication with Redis. Law: an operation that has to be atomic is one script.

`scripts` names the scripts and sends them, `answers` has their arguments and answers. `client` is for records, and
makes it harmless to send a write again; `partitions` is for their journals, `confirming` waits for durability, `clock`
knows the servers' time. `link` receives published messages. `lease` holds a `lock` of the server, `held_leases` lists
all leases. `stream` has the events, `event_channels` the channels on which they are published, `consumers` the readers
of both. `heartbeat` lists the replicas, `partition_assignment` assigns partitions to them.

Design: section 4.
"""
