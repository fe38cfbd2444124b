"""A partitioned run whose training nobody has begun, as those of tests/storage have it."""

from tests.storage.conftest import config, partitioned, run

__all__ = ["config", "partitioned", "run"]
