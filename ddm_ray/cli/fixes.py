"""Remedies of errors, and the next steps, as commands and options of the command line."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddm_ray.remedies import Accept, Allow, Begin, Fix, Give, Make, Mend, Resume
from ddm_ray.run.graph import ROUTER, Artifact
from ddm_ray.spelling import shell_line

if TYPE_CHECKING:
    from ddm_ray.run.run import Run


def phrase(fix: Fix) -> str:
    """A remedy as the command or option that carries it out."""
    match fix:
        case Make(run, artifact, delete):
            begins = f"delete {shell_line(delete)}, then" if delete else "begin with" if fix.first else "make it with"
            made_by = ddm_line("train", run, "all") if fix.with_others else command(run, artifact)
            return f"{begins}: {made_by}"
        case Mend(run):
            return f"mend it with: {ddm_line('doctor', run, '--deep', '--mend')}"
        case Resume(run, artifact):
            if fix.on_island:
                return f"`{ddm_line('work', run, '--island', 'NAME')}` on any island {fix.effect}"
            return f"`{command(run, artifact)}` {fix.effect}"
        case Begin(run, ""):
            return f"begin one with: {ddm_line('init', run, '--recipe', 'NAME')}"
        case Begin(_, field, value):
            return f"begin a run with {shell_line('--set', f'{field}={value}')}"
        case Allow(run, artifact):
            return f"take that back with: {ddm_line('islands', 'resume', run, *words(artifact))}"
        case Accept(run, artifact):
            return f"accept it with: {ddm_line('accept', run, *words(artifact))}"
        case Give(argument, advice, value):
            return f"{advice} with {option(argument)} {value}".rstrip()
    return fix


def by(actor: str) -> Callable[[Fix], str]:
    """`phrase` for a command, the `actor`, that retries training itself, so that the user needn't start another."""
    return lambda fix: f"{actor} {fix.effect}" if isinstance(fix, Resume) else phrase(fix)


def next_of(run: "Run", run_url: str) -> str:
    """The next command after a model is trained; empty if owners or islands decide that themselves.

    It trains the first expert or router that hasn't begun. If all have begun, it shows their status; if all are
    finished, it samples, or first accepts them. `run_url` is the run's name on the command line.
    """
    from ddm_ray.jobs.job_files import list_jobs

    models = [*run.experts, ROUTER]
    files = list_jobs(run.store, models)
    if run.config.partition.given or any(each.unlisted for each in files.values()):
        return ""  # owners, and islands with folders of their own, decide themselves
    left = [each for each in models if not files[each].committed]
    if not left:
        accepted = all(run.finished(each, accepted=True) for each in models)
        return ddm_line("sample", run_url) if accepted else ddm_line("accept", run_url, "--all")
    idle = [each for each in left if not (files[each].attempts or files[each].last_launch or files[each].stopped)]
    return command(run_url, idle[0]) if idle else ddm_line("status", run_url)


def option(argument: str) -> str:
    """The option for an argument of a stage."""
    return f"--{argument.replace('_', '-')}"


def command(run_url: str, artifact: str) -> str:
    """The command that makes an artifact of a run."""
    again = {"reference": "the same command again", "beginning": "the same ddm init again, and ddm partition"}
    return again.get(Artifact(artifact).kind) or ddm_line(*command_words(run_url, artifact))


def command_words(run_url: str, artifact: str) -> list[str]:
    """The words after `ddm` that make an artifact of a run."""
    made = Artifact(artifact)
    if made.kind == "evaluation":
        return ["evaluate", run_url, "--name", made.name or ""]
    if made.trains:
        return ["train", run_url, *words(artifact)]
    owner = [] if made.cluster is None else ["--cluster", str(made.cluster)]
    return [made.stage, run_url, *owner, *(["--source", "URI"] if owner and made.kind == "rows" else [])]


def ddm_line(*words: str) -> str:
    """A command of ours that can be pasted into a shell. All commands that we print are made here."""
    return shell_line("ddm", *words)


def words(artifact: str) -> list[str]:
    """The words for a trained artifact on the command line: `expert 3`, `router`."""
    made = Artifact(artifact)
    return [made.kind] if made.cluster is None else [made.kind, str(made.cluster)]
