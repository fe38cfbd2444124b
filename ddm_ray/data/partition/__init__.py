"""The stage `partition`: rows are clustered and sorted into one shard per cluster, and a report is made."""
