"""Addresses as people read them, and as a browser takes them."""

import pytest

from ddm_ray.serve.cluster.addresses import url_at


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://localhost:8000"),
        ("::", "http://localhost:8000"),
        ("::1", "http://[::1]:8000"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:8000"),
        ("gpu7", "http://gpu7:8000"),
    ],
)
def test_a_url_can_be_opened(host: str, url: str) -> None:
    assert url_at(host, 8000) == url
