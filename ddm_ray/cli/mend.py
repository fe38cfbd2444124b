"""A run's artifacts, examined, and mended if `ddm doctor` is asked to."""

import click

from ddm_ray.cli.command import main, say, say_checked
from ddm_ray.cli.fixes import command, command_words, ddm_line, phrase
from ddm_ray.jobs.examination import Finding, errors_of, examine
from ddm_ray.jobs.living_launches import living_launches
from ddm_ray.jobs.mending import Mending, delete_records, drop_if_different, mending, needed_by
from ddm_ray.remedies import Resume
from ddm_ray.run.graph import KINDS, Artifact, trained_of
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run


def examined(run: Run, run_url: str, deep: bool, mends: bool) -> int:
    """Print what is wrong with each artifact, and its remedy; mend it first if asked. Return how many are wrong."""
    damaged, wrong = list[Mending](), 0
    for finding in examine(run, deep):
        mended = mending(run, finding, deep)
        damaged += [mended] if mended else []
        if finding.only_charts and mended is None and not run.inherits(finding.artifact):
            assert finding.error
            charts = "only charts of its training need it, and no training state has it: leave it"
            say(f"  {finding.artifact:<16} sound but for {finding.error.message}; {charts}")
            continue
        wrong += finding.error is not None
        say_checked(finding.artifact, _words(run, finding, mended))
    if not damaged:
        return wrong
    if not mends:
        options = ["--deep", "--mend"] if deep else ["--mend"]
        say(f"mend what is damaged with: {ddm_line('doctor', run_url, *options)}")
        return wrong
    return wrong - _mend(run, damaged, deep)


def _words(run: Run, finding: Finding, mended: Mending | None) -> str:
    """Words on the damage of an artifact, and what mends it; empty if it is sound."""
    if (error := finding.error) is None:
        return ""
    if mended is not None:
        return f"{error.message}; {_cost(run, mended)}"
    return error.text(phrase)


def _cost(run: Run, mended: Mending) -> str:
    """Words on what --mend does, and the steps of training that it costs."""
    if mended.rewrites:
        return f"its training state of step {mended.step} has the same bytes, and --mend writes them again"
    if mended.make.kind == "reference":
        return "--mend deletes its records, and the next evaluation makes it again"
    if not mended.make.trains:
        return f"--mend deletes its record, then: {command(run.url, mended.make)}"
    again = phrase(Resume(run.url, mended.make, mended.step))
    if mended.finding.names == (NAME,):
        return f"--mend writes it again by the published weights, if they are sound; without them {again}"
    return f"no state of its last step is sound: --mend deletes its manifest, then {again} of {mended.steps}"


def _mend(run: Run, damaged: list[Mending], deep: bool) -> int:
    """Mend, and print what was done and what is left. Return the number of artifacts that are sound now."""
    alive = [each.artifact for each in living_launches(run.store, trained_of(run.config))]
    order, made, total = list(KINDS), dict[tuple[str, ...], Artifact](), len(damaged)
    for mended in sorted(damaged, key=lambda each: order.index(each.make.kind)):
        artifact, line = mended.finding.artifact, command(run.url, mended.make)
        if user := needed_by(run, artifact, alive):
            say(f"{artifact}: left alone, since {user} is trained now and needs it; mend it once that has ended")
        elif artifact.trains and _restored(run, mended):
            say(f"{artifact}: written again, as it was")
        elif mended.rewrites and not deep:
            say(f"{artifact}: no training state has the same bytes after all; see what is sound with --deep")
        elif delete_records(run, mended, deep):
            say(f"{artifact}: deleted {', '.join(mended.delete)}")
            if mended.make.kind == "reference":
                damaged.remove(mended)
                say("  the next evaluation makes it again")
            elif mended.made_at_once:
                made[*command_words(run.url, mended.make)] = mended.make
            else:  # a training may take days: a person chooses where
                say(f"next: {line}")
    for words, artifact in made.items():
        say(f"now: {ddm_line(*words)}")
        code = main.main(list(words), standalone_mode=False)  # prints its own errors
        if code and code > 128:
            click.get_current_context().exit(code)  # a signal has ended it
        if drop_if_different(run, artifact):
            say(f"{artifact}: made again it isn't what others were made from, as its source has changed; they stay as")
            say(f"  they are, and {artifact} unfinished, which only more rows or another partition would need")
    left = [(mended.finding.artifact, errors_of(run, mended.finding.artifact, deep)) for mended in damaged]
    for artifact, errors in left:
        say_checked(artifact, "; ".join(error.text(phrase) for error in errors))
    return total - sum(bool(errors) for _, errors in left)


def _restored(run: Run, mended: Mending) -> bool:
    """True if a trained artifact was written again, without training."""
    from ddm_ray.train.restore import restore_files, restore_manifest

    if mended.finding.names == (NAME,):
        return restore_manifest(run, mended.finding.artifact)
    return mended.rewrites and restore_files(run, mended.finding.artifact, mended.finding.names)
