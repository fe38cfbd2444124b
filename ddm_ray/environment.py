"""Settings of the whole process. Entry points make them by a call; an import of this package changes nothing.

Ray, Serve and DeepSpeed read environment variables, some of them at import.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The driver requests no GPU, and workers set their own. Keep Ray from hiding devices or warning about them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Clients wait for replicas. Ray's default niceness of 15 suits background work.
REPLICAS = {"RAY_worker_niceness": "0"}
# Ingress replicas listen themselves, and a gateway forwards requests to them: Serve's proxy would cost more time than a
# small image. A replica that is drained stays until the gateway knows. Serve's default of 30 s suits clouds' balancers.
DIRECT_INGRESS = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}


def prepare_ray() -> None:
    """Set variables that Ray reads when it starts or when a process joins it, unless they are set."""
    _set_defaults(RAY)


def prepare_serve(direct_ingress: bool) -> None:
    """Set variables that Ray reads when it starts and Serve when it is imported. Call it before both.

    `direct_ingress`: replicas listen themselves, behind a gateway.
    """
    _set_defaults({**RAY, **REPLICAS, **(DIRECT_INGRESS if direct_ingress else {})})


def quiet_pillow() -> None:
    """Ignore Pillow's warnings. Our decoder refuses decompression bombs; other warnings would repeat for many files."""
    warnings.filterwarnings("ignore", module="PIL")


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore their old values in the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)
