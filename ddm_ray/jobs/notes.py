"""Notes: small untrusted JSON objects that attempts, launches, workers and people write to storage.

Each kind of note is read by its types. A field of another type counts as absent; so does NaN for a number.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddm_ray.errors import CorruptArtifact
from ddm_ray.parsing import parse_object
from ddm_ray.run.info import Count
from ddm_ray.store.checksummed import read_some
from ddm_ray.store.store import Store

NOTE_BYTES = 2**16
"""Largest number of bytes that are read of a note."""

Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
Text = Annotated[str, Field(max_length=NOTE_BYTES)]


class StoredNote(BaseModel):
    """A kind of note: its name in messages, its fields and their types. Fields of later versions are ignored."""

    called: ClassVar[str]
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class Beat(StoredNote):
    """A heartbeat: its counter, the pause after it in seconds, the attempt's progress and speed, and where it runs.

    `unsaved`: why newer states couldn't be saved; empty if they were. `heldout_loss`: loss of the EMA weights of
    `heldout_step`, with its standard error. `unmeasured`: why the attempt doesn't measure it. `uncompiled`: why the
    model couldn't be compiled.
    """

    called = "heartbeat"
    beat: Count = 0
    beat_seconds: Number = 0.0
    phase: Text = ""
    step: Count = 0
    steps: Count = 0
    first: Count = 0
    loss: Number | None = None
    grad_norm: Number | None = None
    learning_rate: Number | None = None
    heldout_loss: Number | None = None
    heldout_error: Number | None = None
    heldout_step: Count = 0
    unmeasured: Text = ""
    uncompiled: Text = ""
    steps_per_second: Number | None = None
    samples_per_second: Number | None = None
    flops_per_second: Number | None = None
    mfu: Number | None = None
    unsaved: Text = ""
    world_size: Count = 0
    micro_batch: Count | None = None
    zero_stage: Count = 0
    versions: dict[Text, Text] = {}
    host: Text = ""
    pid: Count = 0
    island: Text = ""
    job: Text = ""


class Claim(StoredNote):
    """A claim of an attempt's number: the process and launch that made it, and properties of the attempt."""

    called = "claim"
    id: Text = ""
    host: Text = ""
    pid: Count = 0
    launch: Text | None = None
    island: Text = ""
    job: Text = ""
    world_size: Count = 0
    versions: dict[Text, Text] = {}
    asked: dict[Text, Any] = {}
    most_rows: Count | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] = 1


class Failure(StoredNote):
    """Why an attempt or a launch ended, as `DDMError.to_fields` writes it, and the rows that it took at once."""

    called = "record of a failure"
    error: Text = ""
    kind: Text = ""
    final: bool = False
    passes: bool = False
    fix: Text | dict[Text, Any] | None = None
    micro_batch: Annotated[int, Field(ge=1, lt=2**53)] = 1


class Begun(StoredNote):
    """The record that a launch has begun, and where."""

    called = "record of a launch"
    island: Text = ""
    job: Text = ""
    host: Text = ""
    pid: Count = 0
    processes: Text = ""


class Request(StoredNote):
    """A stop request: who made it, and why."""

    called = "request"
    user: Text = ""
    host: Text = ""
    pid: Count = 0
    why: Text = ""


class Take(StoredNote):
    """A worker's take of a job: the ids of the worker and of its launch."""

    called = "take"
    worker: Text = ""
    launch: Text = ""


def read_note(store: Store, key: str, kind: type[StoredNote]) -> dict[str, Any] | None:
    """The valid fields of a note; None if there is no note.

    Raises CorruptArtifact for anything but a JSON object, for one that is nested too deeply, and for irregular files.
    """
    try:
        fields = parse_object(read_some(store, key, NOTE_BYTES))
    except FileNotFoundError:
        return None
    except ValueError:
        raise CorruptArtifact(f"{store.url}/{key}: not a {kind.called}; delete it") from None
    try:
        return kind.model_validate(fields).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors(include_url=False, include_context=False, include_input=False)}
        return {name: fields[name] for name in kind.model_fields if name in fields and name not in wrong}
