"""Plot which expert is asked for each image, from noise to data.

You learn how to sample from a run, and how to read the routing that comes with the images: the weight of each expert
at each step. Near pure noise the router can't tell much, so a strategy like `full` mixes many experts. Near data one
expert is certain.

    python examples/plot_routing.py runs/digits              # a finished run: writes routing.png
    python examples/plot_routing.py digits-mixture --strategies full sticky nucleus-0.9

RUN may also be a folder that `ddm export` or examples/train_digits.py wrote. It needs the extra `evaluate`, and takes
some seconds for a small run. If the plain picture of one strategy is enough: `output.plot_routing("routing.png")`.
Letters at the end of a name are axes: S steps, B images, K experts.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddm_ray.pipeline import DDMPipeline

parser = argparse.ArgumentParser()
parser.add_argument("run", help="a run, or a folder that was exported")
parser.add_argument("--strategies", nargs="+", default=["full", "top-1", "once"])
parser.add_argument("--images", type=int, default=8)
parser.add_argument("--steps", type=int, help="steps of the solver; by default the run's own")
parser.add_argument("--out", default="routing.png")
args = parser.parse_args()

# A folder that was exported has an index, as a pipeline of diffusers has.
exported = (Path(args.run) / "model_index.json").exists()
pipeline = (DDMPipeline.from_pretrained if exported else DDMPipeline.from_run)(args.run)

# Sample the same images with each strategy. An empty prompt sets no condition.
outputs = {
    strategy: pipeline([""] * args.images, seeds=0, strategy=strategy, num_inference_steps=args.steps, output_type="np")
    for strategy in args.strategies
}

# Each strategy is a panel, and each image a line of it. The colour of a step is its experts' colours, by weight.
palette_K3 = np.array([colormaps["tab10"](k % 10)[:3] for k in range(pipeline.models.info.num_experts)])
figure = Figure(figsize=(9, 0.5 * args.images * len(outputs) + 1), layout="constrained")
panels = figure.subplots(len(outputs), 2, squeeze=False, width_ratios=(1, 16))
for (pictures, panel), (strategy, output) in zip(panels, outputs.items(), strict=True):
    framed_BHWC = np.pad(output.images, [(0, 0), (1, 1), (0, 0), (0, 0)], constant_values=1)
    pictures.imshow(np.concatenate(framed_BHWC).squeeze(), cmap="gray", vmin=0, vmax=1, aspect="auto")
    pictures.axis("off")
    edges_S = [*output.times_S.tolist(), 0.0]
    weights_BSK = output.routing_SBK.permute(1, 0, 2).numpy()
    panel.pcolormesh(edges_S, np.arange(args.images + 1), (weights_BSK @ palette_K3).clip(0, 1))
    panel.hlines(range(1, args.images), 0, 1, color="white", linewidth=4)
    panel.set(xlim=(1, 0), ylim=(args.images, 0), yticks=[])
    evaluations = output.num_expert_rows / args.images
    panel.set_title(f"{strategy}: {evaluations:.0f} evaluations of an expert for each image", loc="left")
panels[-1, 1].set_xlabel("t, from noise (1) to data (0)")
names = [Patch(color=color, label=f"expert {k}") for k, color in enumerate(palette_K3)]
figure.legend(handles=names, loc="outside upper center", ncols=8, frameon=False)
figure.savefig(args.out, dpi=120)

for strategy, output in outputs.items():
    sure_S = output.routing_SBK.amax(dim=2).mean(dim=1)
    first, middle, last = (float(sure_S[step]) for step in (0, len(sure_S) // 2, -1))
    print(f"{strategy}: the heaviest expert has {first:.0%} at first, {middle:.0%} half-way, {last:.0%} at last")
