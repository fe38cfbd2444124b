"""One call of a base with the adapters of eight experts, beside the base alone and beside eight calls.

32 rows over 8 adapters of rank 8 on a DiT of random weights, all in one process and in turn. Sides: the base without an
adapter; `SharedBase`, as mixtures sample; a call for each expert's rows; and one with all adapters at once, of which
each row keeps its own (an alternative to `SharedBase`'s products row by row). Bytes: of an adapter's weights and of a
mixture in memory, beside those of whole experts.

Expected before it ran: the shared call takes 1.1 times the base, eight calls 1.3 times on a CPU, where small batches
cost little more a row; all adapters at once is a tenth slower than row by row.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, interleaved, median_and_spread, options  # noqa: E402

from ddm_ray.config.networks import SIZES  # noqa: E402
from ddm_ray.models import mixed_adapters, weights  # noqa: E402
from ddm_ray.models.adapters import trained_state  # noqa: E402
from ddm_ray.models.network import Network  # noqa: E402
from ddm_ray.sampling.request import ExpertCall  # noqa: E402
from ddm_ray.sampling.shared_base import SharedBase  # noqa: E402

EXPERTS, ROWS, RANK = 8, 32, 8
MOST, MOST_BYTES = 1.15, 1.1
"""The shared call's time over the base's alone; bytes of a mixture in memory over the base and its adapters."""


class AtOnce(mixed_adapters.MixedLinear):
    """All adapters for all rows, of which each row keeps its own: two larger products and a mask."""

    def forward(self, x: Tensor) -> Tensor:
        base, adapter_R = self.linear(x), self._rows.adapter_R
        count, rank = self.a_KrI.shape[:2]
        x_RNI = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
        low_RNc = F.linear(x_RNI, self.a_KrI.flatten(0, 1))
        own_RK = F.one_hot(adapter_R, count).to(x.dtype) * self.scale
        low_RNc = low_RNc * own_RK.repeat_interleave(rank, dim=1)[:, None]
        return base + F.linear(low_RNc, self.b_KOr.permute(1, 0, 2).flatten(1)).view_as(base)


def adapted(base: Network, spec: dict[str, Any], seed: int) -> Network:
    """The base with a random adapter."""
    torch.manual_seed(seed)
    state = {name: 0.05 * torch.randn(each.shape) for name, each in trained_state(weights.build(spec)).items()}
    return weights.from_state(spec, state, base)


def storages(*modules: nn.Module) -> int:
    """Bytes of all tensors of some modules, those that they share once."""
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--size", default="S", choices=SIZES, help="of the DiT")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    size, args.repeats = ("Ti" if args.quick else args.size), (3 if args.quick else args.repeats)
    torch.set_num_threads(1)
    report, device = Report(args.device), args.device
    sizes = dict(zip(("width", "depth", "heads"), SIZES[size], strict=True))
    shape = {"image_size": 16, "channels": 4, "num_classes": 10, "patch_size": 2}
    spec: dict[str, Any] = {"class": "DiT", "config": {**shape, **sizes}}
    torch.manual_seed(0)
    base = weights.build(spec)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    base = base.eval().requires_grad_(False).to(device)
    adapter = {**spec, "adapter": {"rank": RANK, "alpha": None, "targets": ["qkv", "proj", "mlp.fc1", "mlp.fc2"]}}
    networks = [adapted(base, adapter, seed).to(device) for seed in range(EXPERTS)]
    own = sum(4 * each.numel() for each in trained_state(networks[0]).values())
    of_base, shared = storages(base), SharedBase(networks)
    together = storages(shared._mixed, *(each for each in shared._experts if each is not None))
    at_once = SharedBase(networks)
    for module in at_once._mixed.modules():
        if isinstance(module, mixed_adapters.MixedLinear):
            module.__class__ = AtOnce
    x_RCHW, t_R = torch.randn(ROWS, 4, 16, 16, device=device), torch.rand(ROWS, device=device)
    label_R, each = torch.arange(ROWS, device=device) % 10, ROWS // EXPERTS
    parts = [slice(k * each, (k + 1) * each) for k in range(EXPERTS)]
    calls = [ExpertCall(k, x_RCHW[part], t_R[part], label_R[part]) for k, part in enumerate(parts)]

    def one_by_one() -> list[Tensor]:
        return [shared[call.expert](call.x_BCHW, call.t_B, call.condition) for call in calls]  # type: ignore[misc]

    sides: dict[str, Callable[[], Any]] = {
        "base": lambda: base(x_RCHW, t_R, label_R),
        "shared": lambda: shared.together(calls),
        "at once": lambda: at_once.together(calls),
        "eight calls": one_by_one,
    }
    with torch.inference_mode():
        expected = torch.cat(one_by_one())
        for name in ("shared", "at once"):
            error = float((torch.cat(sides[name]()) - expected).abs().max() / expected.abs().max())
            report.add(Claim(f"{name}: largest difference from single calls, over the largest value", error, "", 1e-5))
        seconds = interleaved(sides, args.repeats, device)
    middle, _ = median_and_spread(seconds["base"])
    report.add(Claim(f"DiT-{size}, {ROWS} rows: the base alone", 1e3 * middle, "ms"))
    for name in ("shared", "at once", "eight calls"):
        ratios = [one / other for one, other in zip(seconds[name], seconds["base"], strict=True)]
        ratio, spread = median_and_spread(ratios)
        report.add(Claim(f"{name} over the base alone", ratio, "", MOST if name == "shared" else None, spread))
    report.add(Claim("an adapter's weights over the network's", own / of_base, ""))
    over = together / (of_base + EXPERTS * own)
    report.add(Claim(f"{EXPERTS} experts in memory over the base and {EXPERTS} adapters", over, "", MOST_BYTES))
    report.add(Claim(f"{EXPERTS} experts in memory over {EXPERTS} whole ones", together / (EXPERTS * of_base), ""))
    report.finish(args.json)


if __name__ == "__main__":
    main()
