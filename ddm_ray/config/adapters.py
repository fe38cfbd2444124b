"""Adapters: what is trained beside a frozen network, in place of the network itself."""

from typing import Annotated

from pydantic import Field

from ddm_ray.config.strict_model import StrictModel

Layer = Annotated[str, Field(min_length=1, max_length=200)]


class AdapterConfig(StrictModel):
    """Low-rank matrices beside linear layers of a frozen network (LoRA, arXiv 2106.09685).

    The network is that of `expert.train.init_from`, the same for all experts. A layer W of it computes
    W x + alpha / rank B A x, of which A and B are trained. B is zero at first.
    """

    rank: int = Field(ge=1, le=1024, description="rows of A; 4 to 64, more for more images")
    alpha: float | None = Field(default=None, gt=0, description="alpha / rank scales what the adapter adds; none: rank")
    targets: tuple[Layer, ...] = Field(
        default=(),
        max_length=100,
        description="names of linear layers, or how they end: qkv, mlp.fc1; none: attention to the image, a DiT's MLPs",
    )
