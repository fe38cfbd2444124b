"""Wheels to carry to a machine that has a GPU, torch and the usual packages, but no network.

    python benchmarks/gpu_wheels.py WHEELS

Packages are those that gpu.py needs beyond what images with torch tend to have, in the versions of constraints.txt.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "annotated-types",
    "deepspeed",
    "diffusers",
    "faiss-cpu",
    "hjson",
    "obstore",
    "pydantic",
    "pydantic_core",
    "tensorboardX",
    "typing-inspection",
)
BUILT = {"deepspeed", "hjson"}
"""Those that have no wheels, and are made into some here: pure Python."""
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)


def pinned(package: str) -> str:
    """A package with the version that constraints.txt has."""
    key = re.sub(r"[-_.]+", "-", package).lower()
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() == key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made where it isn't there")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    args = parser.parse_args()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform=manylinux_2_{version}_x86_64" for version in GLIBC]
    where = ["--only-binary=:all:", f"--python-version={args.python}", "--implementation=cp", *platforms]
    fetched = [pinned(package) for package in PACKAGES if package not in BUILT]
    subprocess.run([*pip, "download", "-q", "--no-deps", *where, "--dest", args.folder, *fetched], check=True)
    built = [pinned(package) for package in PACKAGES if package in BUILT]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", args.folder, *built], check=True)
    wheels = sorted(args.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:6.1f} MiB in all")


if __name__ == "__main__":
    main()
