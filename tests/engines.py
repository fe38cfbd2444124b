"""What an engine would run, run here: its scripts, with stand-ins for the commands that they call, which note each."""

import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from ray.scripts.scripts import cli as ray_cli

from ddm_ray.cli import main
from ddm_ray.placement import Island
from tests.conftest import ROOT, wait_for

# `ddm work` ends so, time after time, and so does what tries it again where that may help.
AGAIN_OR_NOT = [("0", 0), ("1", 1), ("2", 2), ("75 0", 0), ("75 75 1", 1)]
README = (ROOT / "cluster_configs/README.md").read_text()
NOTE = """#!/usr/bin/env bash
( flock 9; printf '%s\\0' "${0##*/}" "$@" >&9; printf '\\n' >&9 ) 9>> "$NOTES/calls"
"""
STANDINS = {
    # Each call of ddm ends as the next line of `ends` says; `stay` is until SIGTERM.
    "ddm": """stat -c '%a' "${RAY_AUTH_TOKEN_PATH:-/dev/null}" >> "$NOTES/token_modes"
end=$(head -n 1 "$NOTES/ends"); sed -i 1d "$NOTES/ends"
[ "$end" = stay ] || exit "$end"
trap '/bin/sleep 0.5; touch "$NOTES/saved"; exit 75' TERM; touch "$NOTES/staying"
while :; do /bin/sleep 0.05; done
""",
    # A head is healthy once it was started. Each line of `gives_up` is a start that ends before its node lives.
    "ray": """echo $$ > "$NOTES/ray"
case "$1 $2" in
  "health-check "*) [ -e "$NOTES/head" ]; exit ;;
  "start "*)
    if [ -s "$NOTES/gives_up" ]; then
      sed -i 1d "$NOTES/gives_up"
      exit 1
    fi ;;
  *) exit 0 ;;
esac
trap 'exit 0' TERM
[[ " $* " != *" --head "* ]] || touch "$NOTES/head"
echo "Ray runtime started."
while :; do /bin/sleep 0.05; done
""",
    "srun": 'while [[ "$1" = --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '[ "$1 $2" != "show job" ] || echo "JobId=4242 JobState=${JOB_STATE:-RUNNING} Requeue=1"\n'
    '[ "$1 $2" != "show hostnames" ] || printf "%s\\n" first second\n',
    # Asked for its own address; or whether a node of the head lives, which it does once the head was started.
    "python": """case "$2" in *get_node_ip_address*) echo 10.0.0.7 ;; *) [ -e "$NOTES/head" ] ;; esac
""",
}
SLEEP = "#!/bin/sh\nexec /bin/sleep 0.05\n"


@dataclass(frozen=True)
class Machine:
    """A machine where the commands are stand-ins, with a home and notes of its own."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> "Machine":
        """Make one below a folder."""
        activate = folder / "venv/bin/activate"
        for path in (activate, folder / "bin/ray"):
            path.parent.mkdir(parents=True)
        activate.touch()
        for name, text in {"sleep": SLEEP, **{name: NOTE + body for name, body in STANDINS.items()}}.items():
            path = folder / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        return cls(folder)

    def start(self, *command: str, ends: str = "0", **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in the project's folder; the ddm's that it calls end as `ends` says, word by word."""
        (self.folder / "ends").write_text("\n".join(ends.split()) + "\n")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
        path = f"{self.folder / 'bin'}:{environment['PATH']}"
        environment |= {"HOME": str(self.folder), "NOTES": str(self.folder), "PATH": path, **variables}
        with (self.folder / "errors").open("w") as errors:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def run(self, *command: str, ends: str = "0", **variables: str) -> int:
        """Run it to its end; its exit status."""
        with self.start(*command, ends=ends, **variables) as process:
            try:
                return process.wait(60)
            finally:
                process.kill()

    def terminate_once_at_work(self, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM to it once a ddm stays, which takes a while to leave; its exit status after that."""
        with process:
            try:
                wait_for((self.folder / "staying").exists, 60)
                process.send_signal(signal.SIGTERM)
                status = process.wait(60)
                assert (self.folder / "saved").exists()
                return status
            finally:
                process.kill()

    def rays(self) -> list[dict[str, Any]]:
        """The options of each Ray that was started, the heads first."""
        starts = [ray_understands(words) for words in self.calls("ray") if words[0] == "start"]
        return sorted(starts, key=lambda options: not options["head"])

    def calls(self, name: str) -> list[list[str]]:
        """The words of each call of a command."""
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [words[1:] for line in lines if (words := line.split("\0")[:-1])[0] == name]


def understood(words: list[str]) -> dict[str, Any]:
    """The options of a `ddm work` by name. Raises click's errors and ConfigError for what it would refuse."""
    verb, *arguments = words
    assert verb == "work"
    options = dict(main.commands[verb].make_context(verb, arguments).params)
    options["trained"] = Island.from_json(options["island"], options["placement"]).train
    return options


def ray_understands(words: list[str]) -> dict[str, Any]:
    """The options of a command of `ray`, such as start, by name. Raises click's errors."""
    command: click.Command = ray_cli
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return dict(command.make_context(str(command.name), words).params)


def blocks(engine: str) -> list[str]:
    """The commands of README for an engine, block by block."""
    section = README.partition("\n## Which engine\n")[2].partition("\n## ")[0]
    text = section.partition(f"\n**{engine}.**")[2].partition("\n**")[0]
    return text.split("```\n")[1::2]


def words_of(text: str, program: str) -> list[list[str]]:
    """The words of each command of a program in lines of a shell."""
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and line[0] == program]


def document(path: str) -> Any:
    """A YAML file of cluster_configs."""
    return yaml.safe_load((ROOT / "cluster_configs" / path).read_text())


def gpus(template: dict[str, Any]) -> int:
    """GPUs of a pod."""
    (container,) = template["spec"]["containers"]
    return int(container["resources"]["limits"]["nvidia.com/gpu"])
