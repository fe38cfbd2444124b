"""`partition`: rows clustered and sorted into one shard a cluster, and the report of it."""
