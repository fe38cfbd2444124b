"""Look at a study: real images, and those that its models draw of the same labels by the same seeds, side by side.

    python study/science_look.py shapes --folder F --seed 20 --out docs/study/measured/shapes.jpg

`F` is the folder in which `science.py` has trained the arms of that seed. Nothing is measured here.
"""

import argparse
from pathlib import Path

from PIL import Image

from ddm_ray.pictures.files import write
from ddm_ray.pictures.grid import GridRow, grid
from science_arms import TOLD, Measuring, Ruler
from science_plan import PLANS, Plan


def look(measuring: Measuring, count: int) -> Image.Image:
    """The first `count` images that a seed's models are asked for: a line a model, below the real ones."""
    plan, run = measuring.plan, measuring.made("base")
    against = measuring.made(plan.against.partition("/")[0])
    asked = measuring.asked.request(plan, run.config.sample)
    models = {"monolith": (measuring.models(against, "monolith"), asked, "oracle")}
    if TOLD in plan.arms:
        knowing, request = measuring.told_run(TOLD, plan.arms[TOLD])
        models["told the cluster"] = (measuring.models(knowing, "monolith"), request, "oracle")
    mixture = measuring.models(run)
    models |= {strategy: (mixture, asked, strategy) for strategy in plan.strategies_of(plan.arms["base"])}
    first = slice(0, count)
    rows = [GridRow("real", measuring.train.data_NCHW[measuring.asked.row_M[first]])]
    for name, (each, request, strategy) in models.items():
        images_MCHW, _ = measuring.sampled(each, request.rows(first), strategy)
        rows.append(GridRow(name, images_MCHW))
    return grid(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(sorted(path.stem for path in PLANS.glob("*.yaml")))
    parser.add_argument("plan", help=f"{names}, or a .yaml file")
    parser.add_argument("--folder", type=Path, required=True, help="that of the study's runs")
    parser.add_argument("--seed", type=int, help="none: the first that is reported")
    parser.add_argument("--count", type=int, default=16, help="number of images of each model")
    parser.add_argument("--out", type=Path, required=True, help="the picture: .png, .jpg or .webp")
    args = parser.parse_args()
    plan = Plan.read(args.plan)
    folder = args.folder.resolve() / plan.name
    seed = plan.seeds.reported[0] if args.seed is None else args.seed
    measuring = Measuring.of(plan, folder, seed, Ruler.of(plan, folder))
    write(look(measuring, args.count), args.out)
    print(f"{args.out}: {measuring.base.credit or 'nobody to be credited'}")


if __name__ == "__main__":
    main()
