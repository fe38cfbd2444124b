"""Versions of the libraries with which jobs compute, as their heartbeats name them. They may differ between islands."""

import platform
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

from ddm_ray import __version__
from ddm_ray.jobs.status import Status
from ddm_ray.spelling import printable


def installed_versions() -> dict[str, str]:
    """Versions of the libraries with which this process computes. They may affect the last bit of results."""
    known = {"ddm_ray": __version__, "python": platform.python_version()}
    for library in ("torch", "deepspeed", "ray"):
        with suppress(metadata.PackageNotFoundError):
            known[library] = metadata.version(library)
    return known


def differences(statuses: Iterable[Status]) -> list[str]:
    """A line for each library with different versions among begun jobs, the most common version first."""
    jobs: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for status in statuses:
        named = status.job.heartbeat.get("versions") if status.job else None
        for library, version in (named if isinstance(named, dict) else {}).items():
            jobs[printable(library, 100)][printable(version, 100)].append(status.artifact)
    return [_line(library, by_version) for library, by_version in jobs.items() if len(by_version) > 1]


def _line(library: str, jobs: dict[str, list[str]]) -> str:
    commonest_first = sorted(jobs.items(), key=lambda item: -len(item[1]))
    return f"{library}: " + "; ".join(f"{version} ({', '.join(names)})" for version, names in commonest_first)
