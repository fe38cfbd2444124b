"""Reads shards for training: rows in memory or streamed, in an order fixed by the seed."""
