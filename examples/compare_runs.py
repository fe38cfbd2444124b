"""Compare the images of two runs: which of them are nearer to the real ones, and is that more than luck?

You learn how to evaluate runs and compare them in Python, as `ddm evaluate` and `ddm compare` do. Both runs need the
same data; they may differ in everything else. For example, does a mixture of four experts beat one of two?

    python examples/compare_runs.py runs/two runs/four                # writes compare.png and compare.html
    python examples/compare_runs.py runs/two runs/four --models once full monolith

It needs the extra `evaluate`. Each run is sampled once, which takes about a minute for a run of the recipe digits;
after that a comparison takes seconds.
"""

import argparse
from pathlib import Path

from ddm_ray.evaluate.compare import Side, compare
from ddm_ray.evaluate.compare_report import comparison_table, render_comparison
from ddm_ray.evaluate.run import evaluate
from ddm_ray.run.run import Run

parser = argparse.ArgumentParser()
parser.add_argument("runs", nargs=2)
parser.add_argument("--models", nargs="+", default=["once"], help="strategies of the mixture, monolith or student")
parser.add_argument("--evaluation", default="default", help="name of the evaluations; those that exist are taken")
parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture and the page")
args = parser.parse_args()

# Sample and measure each run. This does nothing for a run that has the evaluation already.
runs = [Run.open(place) for place in args.runs]
for run in runs:
    print(f"evaluating {run.url}", flush=True)
    evaluate(run, args.evaluation)

# Measure all images again with the same features, against the same real images. The first line is the baseline.
sides = [Side(run, args.evaluation, place) for run, place in zip(runs, args.runs, strict=True)]
comparison = compare(sides, args.models)
print(comparison_table(comparison))
(args.out / "compare.png").write_bytes(comparison.grid_png)
(args.out / "compare.html").write_text(render_comparison(comparison))

# The same in your own words. An interval that contains 0 may be the luck of the seeds.
distances = {line["model"]: line["frechet"] for line in comparison.lines}
print(f"nearest to real images: {min(distances, key=distances.__getitem__)}")
for difference in comparison.differences:
    verdict = "may be luck" if difference.low <= 0 <= difference.high else "is more than the luck of the seeds"
    print(f"{difference.model} minus {difference.against}: {difference.frechet:+.2f}, which {verdict}")
