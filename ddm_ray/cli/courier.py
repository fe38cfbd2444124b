"""Verbs for islands that have no store in common: pack an archive, which anyone may carry, and unpack it."""

from functools import partial
from pathlib import Path

import click

from ddm_ray.cli.command import INDEX, MODEL, RUN, main, say, trained, warn
from ddm_ray.cli.fixes import command, phrase
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@MODEL
@INDEX
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="Archive to write.")
@click.option("--inputs", is_flag=True, help="Pack what it is trained from, also if it is finished.")
@click.option("--result", is_flag=True, help="Pack what was trained; an error if it isn't finished.")
def pack(run_url: str, model: str, index: int | None, out: Path, inputs: bool, result: bool) -> None:
    """Write one archive of what an island needs to train a model, or of what it gives back, for any courier.

    For a model that isn't finished it holds run.json and what it is trained from: an expert's own shard, or for the
    router and the monolith all shards. For one that is finished it holds the trained weights alone. So on the way out
    and on the way home the command is the same; it says which of the two it packed, and --inputs or --result choose.

    \b
      ddm pack runs/digits expert 3 -o to-island.tar      here, before: the shard of expert 3
      ddm unpack to-island.tar work/digits                on the island
      ddm train work/digits expert 3
      ddm pack work/digits expert 3 -o home.tar           there, afterwards: its weights
      ddm unpack home.tar runs/digits                     here

    The archive is a plain tar, not compressed and not encrypted: rows of images lie open in it. With
    partition.method=given these are an owner's, and leave only by --inputs.
    """
    from ddm_ray.storage import courier
    from ddm_ray.storage.run import Run
    from ddm_ray.watch.live_view import LiveView

    if inputs and result:
        raise ConfigError("--inputs and --result: choose one, or none")
    run = Run.open(run_url)
    artifact = trained("pack", model, index, len(run.experts))
    with LiveView(run.url, [artifact], phrase=phrase) as view:
        holds: courier.Holds | None = "inputs" if inputs else "result" if result else None
        packed = courier.pack(run, artifact, out, holds, partial(view.stage, artifact))
        view.stage(artifact, 1.0)
    content = "what it is trained from" if packed.holds == "inputs" else "what was trained"
    say(f"{out}: {artifact}, {content}: {_count(packed.files)}, {_size(packed.bytes)}")
    if packed.holds == "inputs" and run.predecessors(artifact):
        warn(f"states of {run.url}'s base aren't packed: where it is brought the training begins at step 0")
    say(f"next, where it is brought: ddm unpack {out.name} RUN")


@main.command()
@click.argument("archive", metavar="FILE", type=click.Path(path_type=Path))
@RUN
def unpack(archive: Path, run_url: str) -> None:
    """Put what `ddm pack` packed into RUN: on an island, whose RUN is made, or at home, where a result is missing.

    All of it is verified before anything is written. Nothing that is there is replaced: a file with other bytes,
    another run's archive or a second result for the same model is refused by name. The same command again continues
    where it was interrupted, and is harmless. Only what `ddm pack` wrote is accepted, byte by byte.

    \b
      ddm unpack to-island.tar work/digits
      ddm unpack home.tar s3://lab/run7
    """
    from ddm_ray.storage import courier
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import describe, status
    from ddm_ray.watch.live_view import LiveView

    with LiveView(run_url, [archive.name], phrase=phrase) as view:
        unpacked = courier.unpack(archive, run_url, partial(view.stage, archive.name))
        view.stage(archive.name, 1.0)
    run = Run.open(run_url)
    content = "what it is trained from" if unpacked.holds == "inputs" else "what was trained"
    written = f"{_count(unpacked.written)} of {unpacked.files} written" if unpacked.written else "all there already"
    say(f"{unpacked.artifact}, {content}: {_size(unpacked.bytes)}, {written}, in {run.url}")
    if unpacked.holds == "inputs":
        say(f"next: {command(run_url, unpacked.artifact)}")
    else:
        say(f"{unpacked.artifact}: {describe(status(run, unpacked.artifact), phrase)}")


def _count(files: int) -> str:
    return f"{files} file{'' if files == 1 else 's'}"


def _size(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
