"""Runs that are derived from others, as `ddm init --from` does, at URLs that follow from what is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddm_ray.config.derive import ChangeRequest
from ddm_ray.data.append import appended, look_for_new, plan_rows
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.new_files import NewFiles
from ddm_ray.jobs.derive import begin_derived, plan_derivation
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import create_run, require_initial_weights
from ddm_ray.sampling.kept_router import keep_router
from ddm_ray.store.checksummed import sha256


@dataclass(frozen=True)
class Appending:
    """A run with new files, and the files."""

    run: Run
    new: NewFiles


def derive(base: Run, *settings: str, url: str | None = None, **request: Any) -> Run:
    """The run that differs from `base` in settings, and in `request` (see `ChangeRequest`)."""
    return _begin(base, ChangeRequest(settings=settings, **request), url)


def extend(base: Run, *settings: str) -> Run:
    """The run with more steps."""
    return derive(base, *settings)


def append(base: Run, steps: Mapping[str, int], source: str | None = None) -> Appending:
    """The run with new files, and with so many steps of each part."""
    new = look_for_new(base, source)
    settings = tuple(f"{part}.train.steps={count}" for part, count in steps.items())
    run = _begin(base, ChangeRequest(settings=settings, append=appended(new)), None)
    plan_rows(run, new)
    return Appending(run, new)


def _begin(base: Run, request: ChangeRequest, url: str | None) -> Run:
    planned = plan_derivation(base, request)
    url = url or f"{base.url}-{sha256(repr(request).encode())[:6]}"
    run, noted = begin_derived(url, planned, require_initial_weights, create_run)
    assert noted
    if planned.config.changes.only_dropped:
        partition(run)
        keep_router(run)
    return run
