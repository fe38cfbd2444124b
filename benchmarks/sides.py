"""The two sides that are compared: mixtures of networks with random weights, and one of them in a loop by hand.

Shapes: B rows, CHW image, K experts, L tokens of E channels, C conditions.
"""

import argparse
from collections.abc import Callable

import torch
from claims import interleaved
from torch import Tensor, nn

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.models import weights
from ddm_ray.models.router import Router
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.sampling.run_models import Models

NUM_CLASSES = 1000
# Of a text: the tokens and channels of CLIP-L, which LAION's recipe has.
NUM_TOKENS, TEXT_DIM = 77, 768
# Width of the router over the expert's; both are 12 layers to the expert's 28.
ROUTERS = {"Ti": 192 / 1152, "B": 768 / 1152}


class Bench:
    """Networks of one size and kind of condition, and the two sides: mixtures of them, and one in a loop by hand."""

    def __init__(self, args: argparse.Namespace, texts: bool = False) -> None:
        self.args, self.device, self.texts = args, args.device, texts
        self.shape = (4, args.image_size, args.image_size)
        self.trunk = {
            "image_size": args.image_size,
            "channels": 4,
            "num_classes": None if texts else NUM_CLASSES,
            "text_dim": TEXT_DIM if texts else None,
            "patch_size": args.patch_size,
        }
        size = {"width": args.width, "depth": args.depth, "heads": args.heads}
        self.spec = {"class": "DiT", "config": self.trunk | size}

    def expert(self) -> nn.Module:
        """One expert on the CPU, its weights random, none of them 0."""
        model = weights.build(self.spec)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        return model.eval()

    def router(self, num_experts: int, size: str) -> nn.Module:
        """A router in the proportion of `size` to XL. As initialised, it finds all experts equally likely."""
        heads = max(1, round(self.args.heads * ROUTERS[size]))
        width = 8 * heads * max(1, round(self.args.width * ROUTERS[size] / heads / 8))
        depth = max(1, round(self.args.depth * 12 / 28))
        model = Router(num_experts=num_experts, **self.trunk, width=width, depth=depth, heads=heads)
        return model.eval().to(self.device)

    def info(self, num_experts: int) -> MixtureInfo:
        num_classes = None if self.texts else NUM_CLASSES
        prior_CK = torch.full(((num_classes or 0) + 1, num_experts), 1 / num_experts, dtype=torch.float64)
        return MixtureInfo(num_experts, self.shape, num_classes, prior_CK)

    def condition(self, batch: int) -> Condition:
        """Labels, or texts of many lengths."""
        if not self.texts:
            return torch.arange(batch) % NUM_CLASSES
        tokens_BLE = torch.randn(batch, NUM_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(batch))
        return Text(tokens_BLE, torch.arange(NUM_TOKENS) <= 10 * torch.arange(batch)[:, None] % NUM_TOKENS)

    def request(self, condition: Condition, strategy: str, cluster_B: Tensor | None = None) -> SampleRequest:
        seeds = tuple(range(len(condition)))
        settings = SamplingSettings(steps=self.args.steps, solver="euler", strategy=strategy)
        return SampleRequest(seeds, condition, settings, cluster_B)

    def mixture(self, experts: driver.Experts, router: nn.Module | None, request: SampleRequest) -> object:
        return Models(self.info(len(experts)), experts, router, self.device).sample(request)

    def dense(self, network: nn.Module, noise_BCHW: Tensor, condition: Condition) -> Tensor:
        """One network in an Euler loop with nothing around it."""
        x_BCHW, condition, steps = noise_BCHW.to(self.device), condition.to(self.device), self.args.steps
        with torch.inference_mode():
            for step in range(steps):
                t_B = torch.full((len(x_BCHW),), 1 - step / steps, device=self.device)
                x_BCHW = x_BCHW - network(x_BCHW, t_B, condition) / steps
        return x_BCHW.cpu()

    def router_alone(self, router: nn.Module, noise_BCHW: Tensor, condition: Condition, calls: int) -> None:
        """So many of a trajectory's calls of the router."""
        condition = condition.to(self.device)
        with torch.inference_mode():
            for call in range(calls):
                t_B = torch.full((len(noise_BCHW),), 1 - call / calls)
                router(noise_BCHW.to(self.device), t_B.to(self.device), condition).cpu()

    def interleaved(self, sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return interleaved(sides, self.args.repeats, self.device)


class DealtOut(nn.Module):
    """A router's work with another answer: row i belongs to expert i modulo K."""

    def __init__(self, router: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.router, self.num_experts = router, num_experts

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        expert_B = torch.arange(len(x_BCHW), device=x_BCHW.device) % self.num_experts
        return self.router(x_BCHW, t_B, condition) + 10 * nn.functional.one_hot(expert_B, self.num_experts)
