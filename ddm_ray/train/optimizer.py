"""The optimizer of a job: torch's AdamW that clips and keeps an EMA, and never has the host wait for its device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.train.zero_shards import EMA, MOMENTS

# Elements of which one fp32 sum of squares is taken.
NORM_CHUNK_CPU, NORM_CHUNK_GPU = 2**16, 2**24


class AdamWithEMA(torch.optim.AdamW):
    """torch's AdamW that also keeps `ema <- decay ema + (1 - decay) parameter`, starting at the initial value.

    DeepSpeed hands it fp32 shards of the parameters, so the EMA is sharded as they are. `clip_norm` > 0 clips the
    gradients of all that it holds, or (`sharded`) of what all ranks together do, for when nobody has done so before;
    then no step is taken where one isn't finite. `norm` is what they had before, a float64 scalar on their device,
    infinite where it isn't finite. With `compiled` all that a shard's update reads and writes goes through once.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        ema_decay: float,
        clip_norm: float = 0.0,
        sharded: bool = False,
        compiled: bool = False,
        **adamw: Any,
    ):
        super().__init__(params, fused=True, **adamw)
        self.ema_decay, self.clip_norm, self._sharded = ema_decay, clip_norm, sharded
        self._compiled_update = torch.compile(update, dynamic=False) if compiled else None
        self.norm = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def materialise(self, shards: Iterable[Tensor]) -> None:
        """Make the state of a first step that hasn't been taken: moments of zero, the EMA at the value."""
        for shard in shards:
            self.state[shard] = {"step": torch.zeros((), device=shard.device), EMA: shard.detach().clone()}
            self.state[shard] |= {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One AdamW step on every shard with a gradient, then one of its EMA; none if what it clips isn't finite."""
        shards = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.materialise(shard for shard in shards if shard not in self.state)
        if not self.clip_norm:
            super().step(closure)
            torch._foreach_lerp_([self.state[shard][EMA] for shard in shards], shards, 1.0 - self.ema_decay)
            return
        norm = self._norm([shard.grad for shard in shards])
        finite = norm.isfinite()
        self.norm = torch.where(finite, norm, torch.inf)
        # In the gradients' own precision: by another they are multiplied one by one.
        factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
        if self._compiled_update is not None:
            for group in self.param_groups:
                self._update(group, factor, finite)
            return
        torch._foreach_mul_([shard.grad for shard in shards], factor)
        self.found_inf = (~finite).float()  # torch's own step heeds it
        super().step(closure)
        for shard in shards:
            self.state[shard][EMA].lerp_(shard, finite * (1.0 - self.ema_decay))

    @torch.no_grad()
    def make_code(self) -> None:
        """Have the compiled update made, if there is one, by an update that changes nothing."""
        if self._compiled_update is None:
            return
        for group in self.param_groups:
            for shard in group["params"]:
                shard.grad = torch.zeros_like(shard)
            device = group["params"][0].device
            self._update(group, torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device))
            for shard in group["params"]:
                shard.grad = None

    def go_uncompiled(self) -> None:
        """Update without compiled code from here on."""
        self._compiled_update = None

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of all gradients, float64: of those held here, or by all ranks."""
        # In chunks: over millions of elements one sum in fp32 is off by a thousandth on a CPU; a GPU sums as a tree.
        size = NORM_CHUNK_GPU if gradients[0].is_cuda else NORM_CHUNK_CPU
        chunks = [chunk for gradient in gradients for chunk in gradient.view(-1).split(size)]
        square = torch.stack(torch._foreach_norm(chunks)).double().square().sum()
        if self._sharded:
            torch.distributed.all_reduce(square)
        return square.sqrt()

    def _update(self, group: dict[str, Any], factor: Tensor, finite: Tensor) -> None:
        """One step of a group by the compiled update."""
        assert self._compiled_update is not None
        beta_1, beta_2 = group["betas"]
        for shard in group["params"]:
            state = self.state[shard]
            state["step"] += finite
            # On the device, since it counts there; as tensors, since numbers that change would be compiled anew.
            rate = torch.full_like(state["step"], group["lr"])
            self._compiled_update(
                shard,
                shard.grad,
                state[MOMENTS[0]],
                state[MOMENTS[1]],
                state[EMA],
                factor,
                finite,
                kept=1 - rate * group["weight_decay"],
                size=rate / (1 - beta_1 ** state["step"]),
                root=(1 - beta_2 ** state["step"]).sqrt(),
                constants=(beta_1, beta_2, group["eps"], self.ema_decay),
            )


def update(
    value: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    ema: Tensor,
    factor: Tensor,
    finite: Tensor,
    *,
    kept: Tensor,
    size: Tensor,
    root: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    """AdamW (arXiv 1711.05101, algorithm 2) and the EMA of its value, in place, where `finite`; made to be compiled.

    Compiled it is one kernel that reads 20 bytes of each parameter and writes 16. The gradient counts times `factor`.
    Scalars: `kept` of the value by its decay; `size` of a step, and `root` of the second moment's correction, after
    this step; `constants` are both betas, epsilon and the EMA's decay.
    """
    beta_1, beta_2, epsilon, ema_decay = constants
    gradient = gradient * factor
    new_mean = torch.lerp(mean, gradient, 1 - beta_1)
    new_square = beta_2 * square + (1 - beta_2) * gradient.square()
    new_value = kept * value - size * new_mean / (new_square.sqrt() / root + epsilon)
    new_ema = torch.lerp(ema, new_value, 1 - ema_decay)
    for old, new in ((value, new_value), (mean, new_mean), (square, new_square), (ema, new_ema)):
        old.copy_(torch.where(finite, new, old))
