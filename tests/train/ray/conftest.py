"""One site for all tests of training on Ray with several nodes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.data.s3 import BUCKET, s3_server
from tests.train.ray.site import Site


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Site]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("site")
        runs = str(folder)
        if pytestconfig.getoption("in_bucket"):
            stack.enter_context(s3_server(folder / "s3.log"))
            runs = f"s3://{BUCKET}"
        site = Site(folder, stack, runs)
        yield site
        site.see_off()
