"""The configuration of a run that is derived from another one: clusters that join, leave or split, and settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddm_ray.config.changes import Appended, Changes, Joined
from ddm_ray.config.recipe import apply_settings
from ddm_ray.config.run import RunConfig, parse_config
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import numbers_in_words

NEAREST: Literal["nearest"] = "nearest"
NEW = "experts.new."
"""Beginning of settings for the experts of all new clusters."""
CHILDREN = 2
"""Clusters that a cluster is split into."""


@dataclass(frozen=True)
class ChangeRequest:
    """Differences from the base.

    `settings`: fields of the configuration, as `a.b=value`. `append`: new files for the clusters that there are. `add`:
    images for new clusters, each source with the number of its clusters. `begin_from`: the number of the expert with
    the weights that theirs begin with, NEAREST for that of the nearest cluster, None for random ones. `drop`, `split`,
    `retrain`: clusters.
    """

    settings: tuple[str, ...] = ()
    append: Appended | None = None
    add: tuple[tuple[str, int], ...] = ()
    begin_from: int | Literal["nearest"] | None = None
    drop: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    retrain: tuple[int, ...] = ()

    @property
    def of_clusters(self) -> bool:
        """True if the clusters are to change."""
        return bool(self.append or self.add or self.drop or self.split)


def derived_config(base: RunConfig, url: str, request: ChangeRequest, has_router: bool = True) -> RunConfig:
    """The configuration of a run derived from the run at `url`, with this configuration.

    Clusters keep their numbers, and new ones have numbers that no earlier cluster had. Children of a cluster begin with
    its expert, experts with new images with their own weights, and the router, if there is one, with its trunk and the
    rows of its head that remain. Raises ConfigError for clusters that there aren't, and for changes that don't go
    together.
    """
    _require_possible(base, request)
    fields = base.model_dump(mode="json")
    changes = _changes(base, request)
    clusters = sorted({*base.partition.clusters, *changes.made} - {*changes.dropped, *changes.split})
    fields["changes"] = changes.model_dump(mode="json")
    if clusters != list(base.partition.clusters):
        numbers = [] if clusters == list(range(len(clusters))) else clusters
        fewest = max(base.partition.num_fine, len(clusters))
        fields["partition"] |= {"num_clusters": len(clusters), "numbers": numbers, "num_fine": fewest}
    fields["experts"] = _experts(base, url, request, changes, clusters)
    if request.append:
        fields["data"]["source"] = request.append.source
        fields["expert"]["train"]["init_from"] = _own(url)
        if base.student.train and base.student.train.init_from:
            fields["student"]["train"]["init_from"] = _own(url)
    if request.of_clusters:
        fields["router"]["train"]["init_from"] = _own(url) if has_router else None
    if base.student.train is None and any(each.startswith("student.train.") for each in request.settings):
        fields["student"]["train"] = base.student_train.model_dump(mode="json")
    apply_settings(fields, _for_new_experts(request.settings, changes))
    config = parse_config(
        fields, "the derived run" + (f" with {' '.join(request.settings)}" if request.settings else "")
    )
    if not request.append and config.data.source != base.data.source:
        raise ConfigError("data.source: a source isn't replaced in a derived run; append new files, or add a cluster")
    if request.of_clusters and _of_partition(config) != _of_partition(base):
        raise ConfigError("partition: clusters that change one by one can't be made again, too: derive two runs")
    return config


def router_stays(before: RunConfig, after: RunConfig) -> bool:
    """True if a derived run's router is the base's without some rows of its head: clusters left, and that is all."""
    begins = after.router.train.init_from
    if not after.changes.only_dropped or begins is None or begins.network != "own":
        return False
    train = after.router.train.model_copy(update={"init_from": before.router.train.init_from})
    return after.router.model_copy(update={"train": train}) == before.router


def _for_new_experts(settings: Sequence[str], changes: Changes) -> list[str]:
    """The settings, with one for each new cluster in place of one for all of them (`experts.new.`)."""
    if not changes.made and any(each.startswith(NEW) for each in settings):
        raise ConfigError(
            f"{NEW.rstrip('.')} is for new clusters, and there is none: name the cluster, as in experts.3"
        )
    return [
        each.replace(NEW, f"experts.{cluster}.", 1)
        for each in settings
        for cluster in (changes.made if each.startswith(NEW) else (0,))
    ]


def _of_partition(config: RunConfig) -> dict[str, Any]:
    return config.partition.model_dump(exclude={"num_clusters", "numbers", "num_fine"})


def _require_possible(base: RunConfig, request: ChangeRequest) -> None:
    known, partition = base.partition.clusters, base.partition
    if {*request.drop} >= {*known} and not request.add:
        raise ConfigError("drop: no cluster would remain")
    begins = (request.begin_from,) if isinstance(request.begin_from, int) else ()
    named = {"drop": request.drop, "split": request.split, "retrain": request.retrain, "begin from": begins}
    for verb, clusters in named.items():
        for cluster in clusters:
            if cluster not in known:
                raise ConfigError(f"{verb} {cluster}: the base has clusters {numbers_in_words(known)}")
    if twice := sorted({*request.drop} & {*request.split} | {*request.retrain} & {*request.drop, *request.split}):
        raise ConfigError(f"cluster {twice[0]}: leaves, splits or is retrained: choose one of these")
    if request.begin_from is not None and not request.add:
        raise ConfigError(f"begin from {request.begin_from}: is for new clusters, and none is added")
    if base.expert.adapter and (request.append or request.split or request.begin_from is not None):
        raise ConfigError(
            "the experts are adapters, and all begin with their base alone: new files, a split and another beginning"
            " aren't possible; add a cluster of new images, or begin a new run"
        )
    if request.append and request.split:
        raise ConfigError("new files can't join clusters that are being split: derive a run with these, and then split")
    if request.begin_from == NEAREST and not partition.by_kmeans:
        raise ConfigError(f"partition.method is {partition.method}: only clusters of k-means have a nearest one")
    alike = [
        each for each in known if each not in base.experts or not (base.experts[each].model or base.experts[each].flow)
    ]
    if request.begin_from == NEAREST and not alike:
        raise ConfigError("begin from nearest: no expert of the base has the network that new ones have")
    several = bool(request.split) or any(number > 1 for _, number in request.add)
    if several and not partition.by_kmeans:
        raise ConfigError(
            f"partition.method is {partition.method}: only clusters of k-means can be split, or be several"
        )
    if request.append and not partition.by_kmeans and partition.numbers:
        raise ConfigError(f"partition.method is {partition.method}: new files have no place since its clusters changed")


def _changes(base: RunConfig, request: ChangeRequest) -> Changes:
    next_number = max([*base.partition.clusters, base.changes.numbered - 1]) + 1
    joined, split = list[Joined](), dict[int, tuple[int, ...]]()
    for source, number in request.add:
        joined.append(Joined(source=source, clusters=tuple(range(next_number, next_number + number))))
        next_number += number
    for cluster in sorted({*request.split}):
        split[cluster] = tuple(range(next_number, next_number + CHILDREN))
        next_number += CHILDREN
    return Changes(
        joined=tuple(joined),
        split=split,
        dropped=tuple(sorted({*request.drop})),
        retrained=tuple(sorted({*request.retrain})),
        appended=request.append,
        generation=base.changes.generation + (request.append is not None),
        numbered=next_number if request.of_clusters or base.changes.numbered else 0,
        pooled=base.changes.pooled and not request.drop,
    )


def _experts(
    base: RunConfig, url: str, request: ChangeRequest, changes: Changes, clusters: Sequence[int]
) -> dict[str, Any]:
    """The experts that differ from the others, by cluster."""
    differing = {cluster: each.model_dump(mode="json") for cluster, each in base.experts.items()}
    for parent, children in changes.split.items():
        for child in children:
            differing[child] = _beginning(differing.get(parent), {"source": url, "network": f"expert {parent}"})
    first = request.begin_from
    for each in changes.joined:
        for cluster in each.clusters:
            if first == NEAREST:
                differing[cluster] = _beginning(None, {"source": url, "network": NEAREST})
            elif first is not None:
                differing[cluster] = _beginning(differing.get(first), {"source": url, "network": f"expert {first}"})
            elif not base.expert.adapter and (base.expert.train.init_from or request.append):
                differing[cluster] = _beginning(None, None)
    if request.append:  # also those with a beginning of their own go on from what they are now
        for cluster in {*base.experts} & {*clusters}:
            differing[cluster] = _beginning(differing[cluster], _own(url))
    for cluster in changes.retrained:  # with another seed, as the same training would give the same bits
        again = _beginning(differing.get(cluster), None)
        if base.expert.adapter:
            again["train"].pop("init_from")
        seed = base.expert_of(cluster).train.seed + 1
        differing[cluster] = {**again, "train": {**again["train"], "seed": seed}}
    return {str(cluster): differing[cluster] for cluster in sorted(differing) if cluster in clusters}


def _beginning(changes: dict[str, Any] | None, init_from: dict[str, Any] | None) -> dict[str, Any]:
    """Changes of an expert that begins with these weights, and is otherwise like one with `changes`."""
    changes = changes or {"model": {}, "flow": {}, "train": {}}
    return {**changes, "train": {**changes["train"], "init_from": init_from}}


def _own(url: str) -> dict[str, Any]:
    return {"source": url, "network": "own"}
