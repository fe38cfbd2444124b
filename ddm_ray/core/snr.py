"""Experts and routers of any path and prediction on the linear path, which is the one that is sampled, and back.

Two paths have different marginals at the same t, so converting an output isn't enough: the network is asked where
its own path has the linear path's signal-to-noise ratio (Kingma et al. 2021, arXiv 2107.00630).
Shapes: B rows, CHW image, K experts.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.core.flow import PATHS, Flow, append_dims, target, to_data_and_noise
from ddm_ray.errors import SamplingError

MAX_NETWORK_LOG_SNR = 2 * math.log(50)
"""Largest |log SNR| at which a network is asked if its prediction doesn't tell data from noise at that end.

Data from a noise prediction are off by the network's error times 1 / alpha, here 50 at most. At 1,000 the first step
spoils the image: twice the Frechet distance, for a small network trained on digits. At 20 it is hardly better.
"""


def at_matched_snr(flow: Flow, x_BCHW: Tensor, t_B: Tensor, own_path: str = "linear") -> tuple[Tensor, Tensor]:
    """(x', t'): t' has on flow's path the log-SNR of t on `own_path`, that of x; x' is x scaled by alpha'/alpha.

    That ratio is sigma'/sigma too, and is computed as sqrt((alpha'^2 + sigma'^2) / (alpha^2 + sigma^2)), which
    is never 0 / 0. An SNR beyond the path's end, or singular for the prediction, becomes the nearest
    that isn't. SamplingError for t outside [0, 1], on a CPU: elsewhere the host would wait to look.
    """
    if t_B.is_cpu and not ((t_B >= 0) & (t_B <= 1)).all():
        raise SamplingError("a t is outside [0, 1], where 0 is data and 1 is noise")
    own, path = PATHS[own_path], PATHS[flow.path]
    matched_B = flow.clamp_to_nonsingular(path.time_of(own.log_snr(t_B)), MAX_NETWORK_LOG_SNR)
    length = torch.hypot(path.alpha(matched_B), path.sigma(matched_B))
    scale_B = length / torch.hypot(own.alpha(t_B), own.sigma(t_B))
    return append_dims(scale_B, x_BCHW) * x_BCHW, matched_B


class VelocityField(nn.Module):
    """A network of `flow` as a velocity of the linear path: (x_BCHW, t_B in [0, 1], condition) -> noise - data.

    Computed in float32, or float64 where x is; the network sees x's dtype and the result has it. Exact for an exact
    network wherever its path has the SNR. Beyond (t > .9937 for ddpm, |log SNR| > MAX_NETWORK_LOG_SNR at a
    singular end) the network is asked at the nearest SNR for the end that is left, data near 1 and noise near 0, and
    the velocity leads from x itself to that end.

    Root mean square error there, for data ~ N(0, s^2): of data and score predictions below t = .02 at most .02 / s,
    and 1, so that images of many steps keep noise of .007; of noise and score predictions above t = .98 at most
    .02 s^2; of any on ddpm's path above t = .9937 at most .0064 s^2.
    """

    def __init__(self, network: nn.Module, flow: Flow) -> None:
        super().__init__()
        self.network, self.flow = network, flow

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        x, time_B = _at_least_float32(x_BCHW, t_B)
        matched_BCHW, matched_B = at_matched_snr(self.flow, x, time_B)
        output = self.network(matched_BCHW.to(x_BCHW.dtype), matched_B, condition).to(x.dtype)
        data, noise = to_data_and_noise(self.flow, matched_BCHW, output, matched_B)
        t = append_dims(time_B, x)
        # Equal where the SNR is matched, x then being (1-t) data + t noise. Each divides by what is at least .5.
        from_data, from_noise = (x - data) / t.clamp(min=0.5), (noise - x) / (1 - t).clamp(min=0.5)
        return torch.where(t > 0.5, from_data, from_noise).to(x_BCHW.dtype)


class PredictionField(nn.Module):
    """A velocity of the linear path as the prediction of `flow`: (x_BCHW, t_B, condition) on that flow's path.

    The inverse of VelocityField, where the path has the SNR: the velocity has no singular end.
    """

    def __init__(self, field: nn.Module, flow: Flow) -> None:
        super().__init__()
        self.field, self.flow = field, flow

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        x, time_B = _at_least_float32(x_BCHW, t_B)
        linear_BCHW, linear_B = at_matched_snr(Flow(), x, time_B, self.flow.path)
        velocity = self.field(linear_BCHW.to(x_BCHW.dtype), linear_B, condition).to(x.dtype)
        data, noise = to_data_and_noise(Flow(), linear_BCHW, velocity, linear_B)
        return target(self.flow, data, noise, time_B).to(x_BCHW.dtype)


class MatchedRouter(nn.Module):
    """A router trained on `path`: (x_BCHW, t_B, condition) of the linear path -> its logits_BK, unchanged.

    A posterior depends on x and the SNR alone, so matching these is enough, at any t.
    """

    def __init__(self, network: nn.Module, path: str) -> None:
        super().__init__()
        self.network, self.flow = network, Flow(path)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        matched_BCHW, matched_B = at_matched_snr(self.flow, *_at_least_float32(x_BCHW, t_B))
        return self.network(matched_BCHW.to(x_BCHW.dtype), matched_B, condition)


def velocity_field(network: nn.Module, flow: Flow) -> nn.Module:
    """The network as a velocity of the linear path; itself where it is one already."""
    return network if flow == Flow() else VelocityField(network, flow)


def bare(model: Any) -> Any:
    """The network itself, without what matches its flow to the linear path."""
    return model.network if isinstance(model, VelocityField | MatchedRouter) else model


def as_prediction(network: nn.Module, flow: Flow, asked: Flow) -> nn.Module:
    """A network of `flow` as one of another flow, so that their predictions can be mixed; itself where it is one."""
    return network if flow == asked else PredictionField(velocity_field(network, flow), asked)


def _at_least_float32(x_BCHW: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x_BCHW.dtype, torch.float32)
    return x_BCHW.to(dtype), t_B.to(dtype)
