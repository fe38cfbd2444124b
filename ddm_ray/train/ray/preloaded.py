"""All that a driver loads, for the server that drivers are forked from, which heeds no SIGTERM: its command does."""

import signal

import ddm_ray.train.ray.fit  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
