"""Shards as training reads them: rows in memory or streamed, in an order fixed by the seed."""
