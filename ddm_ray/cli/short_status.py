"""The short form of a run's status: a line for each stage and model that fits into a terminal, and notes below."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len, set_cell_size

from ddm_ray.cli.fixes import phrase, words
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import Status
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import EvaluationInfo, PartitionInfo, RowsInfo, TrainedInfo
from ddm_ray.spelling import duration, escape_unprintable, printable

BAR, WORD = 12, 10
"""Columns of a bar, and of the state's word."""
HIDDEN = ("centroids", "report", "reference")
"""Kinds that have a line only if something is wrong: they belong to the partition, or to an evaluation."""
SHARED = {"beginning": "first weights", "rows": "rows", "shard": "shards", "replay": "replays"}
"""Kinds with a line for all of their artifacts if there are several, and its name."""
COMMAND = re.compile(r"\bddm [a-z]")
"""Pattern of where a command begins."""
ALARMS = ("failed", "damaged", "stopped")


@dataclass(frozen=True)
class Line:
    """A line of the table: what it is about, the state's word, the finished share, and facts. `alarm`: it is red."""

    name: str
    word: str
    share: float
    facts: tuple[str, ...] = ()
    alarm: bool = False

    @classmethod
    def of(cls, status: Status) -> "Line":
        """The line of one artifact."""
        return cls(name_of(status.artifact), _word(status), status.fraction, tuple(_facts(status)), _is_alarm(status))

    @classmethod
    def of_many(cls, statuses: Sequence[Status]) -> "Line":
        """The line of all artifacts of a kind that has one for each owner or cluster."""
        done = sum(status.state == "finished" for status in statuses)
        wrong = next((status for status in statuses if _is_alarm(status)), None)
        begun = any(status.state != "waiting" for status in statuses)
        word = "finished" if done == len(statuses) else _word(wrong) if wrong else "begun" if begun else "waiting"
        share = sum(status.fraction for status in statuses) / len(statuses)
        name, facts = SHARED[statuses[0].artifact.kind], (f"{done} of {len(statuses)} finished",)
        return cls(name, word, share, facts, wrong is not None)

    def text(self, names: int, steps: int, with_bar: bool) -> str:
        """The line, of which the name takes `names` columns, and the first of several facts `steps`."""
        head = f"{self.name:<{names}}  {self.word:<{WORD}}"
        percent = "    " if self.word == "waiting" else f"{self.share:4.0%}"
        full = round(BAR * self.share)
        bar = f"  {'━' * full}{'─' * (BAR - full)}"
        first, *others = self.facts or ("",)
        facts = "  ".join([first.rjust(steps) if others else first, *others])
        return escape_unprintable(f"{head}{bar if with_bar else ''} {percent}  {facts}".rstrip())


def table(statuses: Sequence[Status], width: int) -> list[tuple[Line, str]]:
    """The lines of the table, and their texts in `width` columns, in the order in which artifacts are made.

    A narrow terminal gets no bars. What is still too long is cut: most often the reason of a failure.
    """
    hidden = [each for each in statuses if each.artifact.kind in HIDDEN and each.state not in ALARMS]
    hidden += [each for each in statuses if each.artifact.kind == "beginning" and each.state == "finished"]
    shown = [each for each in statuses if each not in hidden]
    lines: list[Line] = []
    for kind, members in groupby(shown, key=lambda status: status.artifact.kind):
        each = list(members)
        lines += [Line.of_many(each)] if kind in SHARED and len(each) > 1 else map(Line.of, each)
    names = max((len(line.name) for line in lines), default=0)
    steps = max((len(line.facts[0]) for line in lines if len(line.facts) > 1), default=0)
    texts = [line.text(names, steps, with_bar=True) for line in lines]
    if any(cell_len(text) > width for line, text in zip(lines, texts, strict=True) if not line.alarm):
        texts = [line.text(names, steps, with_bar=False) for line in lines]
    cut = [text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…" for text in texts]
    return list(zip(lines, cut, strict=True))


def notes(statuses: Sequence[Status], width: int | None) -> Iterator[str]:
    """Lines on what needs attention, in full: failures with their remedies, silent jobs, states that can't be saved.

    Lines are wrapped to `width`, if any. Each part of a sentence has lines of its own, and one with a command is a
    single line, however long it is, so that it can be copied.
    """
    for status in statuses:
        job = status.job
        doubtful = job and (job.unsaved or job.beside or job.in_vain or (not job.attempt and not job.lives))
        if not (_is_alarm(status) or status.unaccepted or (status.state in ("begun", "waiting") and doubtful)):
            continue
        text = f"{name_of(status.artifact)}: {describe(status, phrase)}"
        if width is None:
            yield text
            continue
        for number, part in enumerate(text.split("; ")):
            first = "  " if number else ""
            if COMMAND.search(part):
                yield first + part
                continue
            yield from textwrap.wrap(part, width, initial_indent=first, subsequent_indent="  ", break_on_hyphens=False)


def name_of(artifact: Artifact) -> str:
    """Words for an artifact: those of commands, such as `expert 3`, or its path."""
    return " ".join(words(artifact)) if artifact.trains else artifact


def _is_alarm(status: Status) -> bool:
    return status.state in ALARMS or (status.state == "begun" and status.may_be_dead) or status.word == "ended"


def _word(status: Status) -> str:
    job = status.job
    if status.state == "begun" and job:
        return "silent" if status.may_be_dead else printable(job.phase, WORD)
    return status.word


def _facts(status: Status) -> Iterator[str]:
    """Steps, loss and time of a training job; what another stage has made; why something failed."""
    job, info = status.job, status.info
    if status.state in ALARMS:
        yield describe(status, phrase).removeprefix(f"{status.state}: ")
    elif isinstance(info, TrainedInfo):
        yield from (f"{info.step} steps", f"loss {info.loss:.4f}", f"in {duration(info.seconds)}")
    elif isinstance(info, RowsInfo):
        lost = sum(loss.rows for loss in info.losses)
        counts = [(info.rows, "images"), (info.rejected, "left out"), (lost, "lost something")]
        yield ", ".join(f"{count:,} {what}" for count, what in counts if count or what == "images")
    elif isinstance(info, PartitionInfo):
        yield f"{len(info.rows_K)} clusters"
    elif isinstance(info, EvaluationInfo):
        yield f"best strategy {info.best_strategy}"
    elif job and job.attempt and job.steps:
        yield f"{job.step}/{job.steps}"
        if (loss := job.value("loss")) is not None:
            yield f"loss {loss:.4f}"
        if status.seconds_left is not None and job.phase == "training":
            yield f"{duration(status.seconds_left)} left"
    elif status.chunks:
        yield f"{status.chunks.units_done} of {status.chunks.units} {status.artifact.units}"
