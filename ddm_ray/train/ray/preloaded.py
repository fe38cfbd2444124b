"""Libraries of a driver, loaded by the server that drivers are forked from. It ignores SIGTERM: its command ends it.

Ray Train and Ray Data aren't among them: once they are loaded, Ray has drawn random numbers, and all drivers that are
forked then go on with the same ones. Two objects with one id end the second driver.
"""

import signal

import pandas  # noqa: F401
import ray  # noqa: F401
import torch  # noqa: F401

import ddm_ray.train.job  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
