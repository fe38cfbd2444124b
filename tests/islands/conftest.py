"""A partitioned run whose training nobody has begun, as those of tests/run have it."""

from tests.run.conftest import config, partitioned, run

__all__ = ["config", "partitioned", "run"]
