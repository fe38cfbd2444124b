"""A run of recipe tiny, as those of tests/run have it."""

from tests.run.conftest import config, partitioned, requests, run

__all__ = ["config", "partitioned", "requests", "run"]
