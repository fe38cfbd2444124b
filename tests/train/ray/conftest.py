"""One site for all tests of training on Ray with several nodes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.train.ray.site import Site


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(tmp_path_factory.mktemp("site"), stack)
        yield site
        site.see_off()
