"""Write a strategy of your own: a rule for the experts of an image, and for their weights.

You learn what a strategy is, how a program registers its own, and how a package registers one for all commands.

    python examples/own_strategy.py runs/digits    # prints what the strategy costs, and writes strategies.png

RUN may also be a folder that `ddm export` or examples/train_digits.py wrote. It takes some seconds for a small run.
`ddm sample`, `ddm evaluate` and `ddm serve` know the strategy, too, once a package that registers it is installed. Here
that package is this folder, and its pyproject.toml has the line:

    pip install ./examples
    ddm sample runs/digits --strategy commit-0.9

Letters at the end of a name are axes: B images, K experts.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm_ray.core.names import NUMBER, STRATEGIES, StrategyForm
from ddm_ray.core.routing import Strategy, keep, keep_top


@dataclass(frozen=True)
class Commit(Strategy):
    """Mix all experts until one of them is likely enough, then use that one alone to the end."""

    sure: float = 0.9

    def most(self, num_experts: int) -> int:
        """The largest number of experts that an image uses at once."""
        return num_experts

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        """Turn the router's probabilities into weights. `before_BK` has the weights of the step before."""
        committed_B1 = (before_BK > 0).sum(dim=1, keepdim=True) == 1
        sure_B1 = probs_BK.amax(dim=1, keepdim=True) >= self.sure
        mixed_BK = torch.where(sure_B1, keep_top(probs_BK, 1), keep(probs_BK, probs_BK > 0))
        return torch.where(committed_B1, before_BK, mixed_BK)


# How its names are written, and which numbers are valid: commit, or commit-P.
COMMIT = StrategyForm(
    pattern=f"commit(?:-{NUMBER})?",
    words="commit-P (P in (0, 1])",
    example="commit-0.9",
    code=f"{__name__}:Commit",
    fits=lambda K, sure=0.9: 0 < sure <= 1,
)

if __name__ == "__main__":
    from ddm_ray.pictures.grid import GridRow, grid
    from ddm_ray.pipeline import DDMPipeline

    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a run, or a folder that was exported")
    parser.add_argument("--strategies", nargs="+", default=["full", "commit-0.99", "commit-0.9", "commit-0.6", "top-1"])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, help="steps of the solver; by default the run's own")
    parser.add_argument("--out", default="strategies.png")
    args = parser.parse_args()

    STRATEGIES["commit"] = COMMIT  # for this program alone

    # A folder that was exported has an index, as a pipeline of diffusers has.
    exported = (Path(args.run) / "model_index.json").exists()
    pipeline = (DDMPipeline.from_pretrained if exported else DDMPipeline.from_run)(args.run)
    outputs = {
        strategy: pipeline(
            [""] * args.images, seeds=0, strategy=strategy, num_inference_steps=args.steps, output_type="pt"
        )
        for strategy in args.strategies
    }
    first = outputs[args.strategies[0]]
    for strategy, output in outputs.items():
        evaluations = output.num_expert_rows / args.images
        apart = (output.images - first.images).abs().mean()
        print(
            f"{strategy:<12}{evaluations:6.1f} evaluations of an expert for each image, {apart:.3f} from"
            f" {args.strategies[0]} in each pixel"
        )
    grid([GridRow(strategy, 2 * output.images - 1) for strategy, output in outputs.items()]).save(args.out)
