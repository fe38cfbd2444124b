"""Settings of the whole process, which entry points make by a call: to import a module of this package changes none.

Ray, Serve and DeepSpeed read variables of the environment, some of them when they are imported.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The driver asks for no GPU, and workers set their own: keep Ray from hiding or warning about devices.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# A client waits for what a replica does; Ray's own 15 is for work that gives way to all else on the machine.
REPLICAS = {"RAY_worker_niceness": "0"}
# Replicas of the ingress listen themselves, for a gateway that leads to them: a proxy and its way to a replica cost
# more than a small image. A replica that leaves stays until the gateway knows; Serve's own 30 s are for clouds'
# balancers.
DIRECT_INGRESS = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}


def prepare_ray() -> None:
    """Set variables that Ray reads when it starts or is joined, unless they are set."""
    _set_defaults(RAY)


def prepare_serve(direct_ingress: bool) -> None:
    """Set variables that a Ray reads when it starts and Serve when it is imported; call it before both.

    `direct_ingress`: a gateway leads to replicas that listen themselves.
    """
    _set_defaults({**RAY, **REPLICAS, **(DIRECT_INGRESS if direct_ingress else {})})


def quiet_pillow() -> None:
    """Ignore Pillow's warnings: decoding refuses bombs itself, and the others would come for each of many files."""
    warnings.filterwarnings("ignore", module="PIL")


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and put back in the end what they were."""
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
