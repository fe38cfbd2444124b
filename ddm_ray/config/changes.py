"""Changes of a run since the run that it was derived from: clusters that join, leave or split, and new files."""

from typing import Annotated

from pydantic import Field, PositiveInt

from ddm_ray.config.strict_model import StrictModel

Cluster = Annotated[int, Field(ge=0, lt=100_000)]


class Joined(StrictModel):
    """Clusters of images that weren't in the base: each has an expert of its own. The first names their rows."""

    source: str = Field(min_length=1, max_length=4096, description="the images, as data.source")
    clusters: tuple[Cluster, ...] = Field(
        min_length=1, description="numbers of the clusters that they are divided into"
    )


class Appended(StrictModel):
    """New files. Their images join the clusters that there are."""

    source: str = Field(min_length=1, max_length=4096, description="where they are, as data.source")
    files: PositiveInt = Field(description="their number")
    listing: str = Field(pattern="^[0-9a-f]{64}$", description="digest of their paths and sizes")


class Changes(StrictModel):
    """Changes of the clusters, as they were asked for. What else differs from the base is seen by comparison."""

    joined: tuple[Joined, ...] = Field(default=(), description="clusters of new images")
    split: dict[Cluster, tuple[Cluster, ...]] = Field(
        default={}, description="by a cluster of the base, the clusters that it was divided into"
    )
    dropped: tuple[Cluster, ...] = Field(default=(), description="clusters of the base that left")
    retrained: tuple[Cluster, ...] = Field(default=(), description="clusters with experts that are trained again")
    appended: Appended | None = Field(default=None, description="new files of the clusters that there are")
    generation: int = Field(default=0, ge=0, lt=1000, description="how many times files have been appended so far")
    numbered: int = Field(default=0, ge=0, lt=200_000, description="numbers below it have been clusters' before")
    pooled: bool = Field(
        default=True,
        description="false: rows from which the clusters were made aren't part of the run, since some of these left",
    )

    @property
    def of_clusters(self) -> bool:
        """True if the clusters aren't those of the base."""
        return bool(self.joined or self.split or self.dropped or self.appended)

    @property
    def only_dropped(self) -> bool:
        """True if clusters left, and none came or changed."""
        return bool(self.dropped) and not (self.joined or self.split or self.appended)

    def joined_with(self, cluster: int) -> Joined | None:
        """The new images that a cluster is of; None if it isn't of new images."""
        return next((each for each in self.joined if cluster in each.clusters), None)

    @property
    def made(self) -> tuple[int, ...]:
        """Numbers of the clusters that the base doesn't have."""
        joined = [cluster for each in self.joined for cluster in each.clusters]
        return tuple(sorted([*joined, *(child for children in self.split.values() for child in children)]))
