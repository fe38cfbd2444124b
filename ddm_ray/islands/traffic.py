"""Traffic of one training with storage, foreseen: bytes by what they are, for one attempt that loses no worker."""

from dataclasses import dataclass, fields
from functools import lru_cache

from ddm_ray.config import RunConfig
from ddm_ray.pictures.grid import TILE
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import Artifact
from ddm_ray.train.heartbeat import beat_seconds
from ddm_ray.train.preview import MAX_CLASSES, PER_CLASS, ROWS_WITHOUT_CLASSES
from ddm_ray.train.publish import PAINTED_BYTES
from ddm_ray.train.saving import SaveClock
from ddm_ray.train.sizes import FileSizes

# Bytes as they were counted on the wire, of what is small: a heartbeat, a beat's share of the curves, a pixel of a
# picture, an entry of a listing, and all that is noted of an attempt and its end.
BEAT, CURVE_POINT, PIXEL, LISTED, NOTES = 450, 130, 0.83, 340, 4500


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a job's shards: what it trains on, their manifests with the partition's, held-out rows that it reads."""

    files: int
    manifests: int
    heldout: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes that one training writes to storage (states, weights, curves, notes) and reads from it (rows, reread).

    `reread`: what it has written itself, to commit and to publish it. `rows` is 0 where nobody knows.
    """

    states: float
    weights: float
    curves: float
    notes: float
    rows: float
    reread: float

    @property
    def written(self) -> float:
        """Bytes from the island to storage."""
        return self.states + self.weights + self.curves + self.notes

    @property
    def read(self) -> float:
        """Bytes from storage to the island."""
        return self.rows + self.reread

    def __add__(self, other: "Traffic") -> "Traffic":
        names = [field.name for field in fields(Traffic)]
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in names))

    def scaled(self, share: float) -> "Traffic":
        """The traffic of a share of it."""
        return Traffic(*(share * getattr(self, field.name) for field in fields(Traffic)))


NOTHING = Traffic(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def foresee(
    config: RunConfig,
    artifact: Artifact,
    sizes: FileSizes,
    steps: int,
    seconds: float,
    placement: TrainPlacement,
    rows: RowBytes | None,
) -> tuple[Traffic, int]:
    """The traffic of a training of so many steps and seconds, and the number of its states.

    Storage is taken to be fast: where writing a state takes long, there are fewer.
    """
    every = placement.checkpoint_steps, placement.milestone_steps
    young = placement.checkpoint_steps is None
    saves, published = num_states(seconds, steps, placement.minutes_between_states, every, young), {steps}
    if placement.milestone_steps:
        published |= set(range(placement.milestone_steps, steps, placement.milestone_steps))
    middle = sizes.state(steps // 2)  # what grows, the curve, grows evenly
    indexes = sum(size for name, size in middle.items() if name.endswith("/INDEX.json"))
    weights = sizes.published(steps // 2 if len(published) > 1 else steps)
    picture = _picture(config, artifact, max(weights.values()))
    beats = _beats(seconds, steps)
    looks = NOTES + LISTED * (len(middle) * saves + 10)
    manifests = 0 if rows is None else 5 * rows.manifests
    repainted = max(weights.values()) if picture else 0
    return (
        Traffic(
            states=(saves - 1) * sum(middle.values()) + sum(sizes.state(steps).values()),
            weights=len(published) * (sum(weights.values()) + picture),
            curves=CURVE_POINT * beats * (saves + 1) / 2,  # a file that grows, written whole with each state
            notes=BEAT * beats + NOTES,
            rows=0 if rows is None else rows.files + (rows.heldout if placement.heldout_rows else 0),
            reread=saves * indexes + len(published) * (sizes.read_to_publish(steps) + repainted) + looks + manifests,
        ),
        saves,
    )


@lru_cache(maxsize=256)
def num_states(
    seconds: float, steps: int, minutes: float, every: tuple[int | None, ...] = (), young: bool = True
) -> int:
    """Number of states that a training of so many seconds saves: by the clock, `every` so many steps, and the last.

    `young`: see SaveClock.
    """
    clock, each, step, states = SaveClock(minutes, 0.0, young), seconds / steps, 0, 0
    while step < steps:
        low, high = step + 1, steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if clock.due(middle * each) else (middle + 1, high)
        step = min([low, *(step - step % steps_between + steps_between for steps_between in every if steps_between)])
        clock.saved(step * each)
        clock.written(step * each)
        states += step < steps
    return states + 1


def _beats(seconds: float, steps: int) -> int:
    """Heartbeats of a training: one a step at most, and a few before and after."""
    beats, at = 0, 0.0
    while at < min(seconds, 1000.0):
        at += beat_seconds(at)
        beats += 1
    return min(steps, beats + int(max(0.0, seconds - at) / beat_seconds(at))) + 5


def _picture(config: RunConfig, artifact: Artifact, weights: int) -> float:
    """Bytes of the picture beside published weights; 0 where none is painted."""
    data = config.data
    if artifact.kind == "router" or data.text is not None or weights > PAINTED_BYTES:
        return 0.0
    size = data.image_size * (data.latents.downsampling if data.latents else 1)
    classes = min(MAX_CLASSES, len(data.class_names))
    rows = classes if classes > 1 else ROWS_WITHOUT_CLASSES
    return PIXEL * rows * PER_CLASS * (size * max(1, round(TILE / size))) ** 2
