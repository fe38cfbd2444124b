"""What a GPU can do, and how near to it we come: four commands of under ten minutes, for the day that one is there.

    python benchmarks/gpu.py train  --out OUT    # roofs, a CPU's numbers, a step of DiT-XL/2, its state
    python benchmarks/gpu.py sample --out OUT    # mixtures beside one dense network; embedding, decoding
    python benchmarks/gpu.py large  --out OUT    # an expert of 3B parameters
    python benchmarks/gpu.py whole  --out OUT    # the training loop through a kill, photographs to rows; without Ray

On a bare machine that has torch: `python benchmarks/gpu_wheels.py WHEELS` on one with a network, then there
`python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl` and `PYTHONPATH=.:SITE python benchmarks/gpu.py
...`. facts says what is missing; it, roofs and decode need torch alone or little more.

Each phase is a process of its own with a limit of seconds: an error of the GPU, or a hang, costs that phase alone, and
what it told until then is kept, a line a value (OUT/gpu.jsonl). The table is printed last. Networks are random; neither
weights nor a network are needed. `--tiny --device cpu` goes through all of it without a GPU, which shows that it runs
and nothing else.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARTS = {
    "train": {"facts": 20, "roofs": 50, "right": 110, "step": 250, "state": 110},
    "sample": {"facts": 20, "sampling": 200, "offload": 60, "embed": 150, "decode": 40},
    "large": {"facts": 20, "expert": 130, "sharded_expert": 130},
    "whole": {"facts": 20, "jobs": 200, "rows": 120},
}
MODULES = {
    "gpu": ("facts",),
    "gpu_roofs": ("roofs",),
    "gpu_sample": ("sampling", "offload", "embed", "decode"),
    "gpu_whole": ("jobs", "rows"),
}
NEEDED = ("pydantic", "obstore", "deepspeed", "tensorboardX", "faiss", "timm", "diffusers", "triton")
RESULTS = "gpu.jsonl"


@dataclass(frozen=True)
class Told:
    """A value, its unit, and what it is to be: `<= 1` or `>= 45`, none where nothing is claimed."""

    phase: str
    name: str
    value: Any
    unit: str = ""
    target: str = ""

    @property
    def holds(self) -> bool | None:
        """True if it is as it is to be; None where nothing is claimed."""
        if not self.target:
            return None
        sign, bound = self.target.split()
        if not isinstance(self.value, int | float):
            return False
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)[:160]
        value = " ".join(value.replace("|", "/").split())
        holds = {None: "", True: "yes", False: "no"}[self.holds]
        return f"| {self.phase} | {self.name} | {value} {self.unit} | {self.target} | {holds} |"


@dataclass(frozen=True)
class Asked:
    """How a phase is run, and where what it finds goes to."""

    phase: str
    device: str
    tiny: bool
    out: Path

    def tell(self, name: str, value: Any, unit: str = "", target: str = "") -> None:
        """Keep a value as soon as it is known."""
        with (self.out / RESULTS).open("a") as file:
            file.write(json.dumps(asdict(Told(self.phase, name, value, unit, target))) + "\n")

    def tried(self, name: str, work: Callable[[], None]) -> None:
        """Do a part of the phase; an error of it is what it tells."""
        try:
            work()
        except Exception as error:  # a border: the others go on
            self.tell(name, f"{type(error).__name__}: {error}"[:200], "", ">= 0")


def facts(asked: Asked) -> None:
    """What is there."""
    import torch

    asked.tell("torch", torch.__version__)
    if asked.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        asked.tell("device", torch.cuda.get_device_name())
        asked.tell("memory free", free / 2**30, "GiB")
        asked.tell("memory", total / 2**30, "GiB")
    asked.tell("processors", os.cpu_count())
    asked.tell("missing", ", ".join(name for name in NEEDED if find_spec(name) is None) or "nothing")


def phase_of(name: str) -> Callable[[Asked], None]:
    """A phase by its name; what others need isn't loaded."""
    module = next((module for module, names in MODULES.items() if name in names), "gpu_train")
    phase: Callable[[Asked], None] = facts if module == "gpu" else getattr(import_module(module), name)
    return phase


def run(part: str, asked: Asked, budget: float) -> None:
    """Run the phases of a part one after another, each for as long as it may."""
    ends = time.monotonic() + budget
    for phase, seconds in PARTS[part].items():
        own = Asked(phase, asked.device, asked.tiny, asked.out)
        left, began = min(seconds, ends - time.monotonic()), time.monotonic()
        if left < 5:
            own.tell("left out", "no time is left")
            continue
        log = asked.out / f"{phase}.log"
        command = [sys.executable, __file__, part, "--phase", phase, "--out", str(asked.out), "--device", asked.device]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, *(["--tiny"] if asked.tiny else [])],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = f"exit status {status}" if (status := process.wait(left)) else ""
            except subprocess.TimeoutExpired:
                code = f"stopped after {left:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
                process.wait()
        if code:
            # Of an error of the GPU the last line is advice.
            errors = [line for line in log.read_text().splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
            own.tell("ended", f"{code}: {(errors or [''])[-1]}", "", ">= 0")
        own.tell("took", time.monotonic() - began, "s")


def table(path: Path) -> str:
    """All that was told, as a Markdown table."""
    values = [Told(**json.loads(line)) for line in path.read_text().splitlines()]
    return "\n".join(["| phase | what | value | target | holds |", "|---|---|---|---|---|", *map(str, values)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for what is found")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="does everything run? for a machine without a GPU")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for the part")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    asked = Asked(args.phase or "", args.device, args.tiny, args.out)
    if args.phase:
        phase_of(args.phase)(asked)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run(args.part, asked, args.budget)
    print(table(args.out / RESULTS))


if __name__ == "__main__":
    main()
