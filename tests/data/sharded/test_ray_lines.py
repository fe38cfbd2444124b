"""What Ray Data tells of its executions: to its log file, and to who listens of his own; not to the terminal."""

import logging

import pytest

from ddm_ray.data.sharded.ray_data import RayData


class NoRay(Exception):
    """What the session raises here, where the executor's lines are settled already."""


def test_only_the_console_of_ray_is_quiet() -> None:
    logger, own = logging.getLogger("ray.data"), logging.StreamHandler()
    logger.addHandler(own)

    def session() -> None:
        raise NoRay

    try:
        with pytest.raises(NoRay):
            next(RayData(session=session)(lambda unit: None, None, []))  # type: ignore[arg-type]
        levels = {type(handler).__name__: handler.level for handler in logger.handlers}
    finally:
        logger.removeHandler(own)
    assert levels["PlainRayHandler"] == logging.ERROR
    assert levels["StreamHandler"] == logging.NOTSET and levels["SessionFileHandler"] == logging.NOTSET
