"""The network of one dense model as a component of diffusers.

An export has it beside the weights, in one file with the network's own code and all that both import of ours, so none
of these may need more than torch, numpy and diffusers. Shapes: B rows, CHW image, L text tokens of E channels, a pooled
vector of P.
"""

from typing import Any

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import velocity_field
from ddm_ray.models.network import Network


class DenseTransformer(ModelMixin, ConfigMixin):
    """A velocity on the linear path, noise - data, whatever path and prediction the network was trained for.

    `kind` is the name of a Network, `network` its arguments, `flow` those of a Flow; `image_shape` is (C, H, W).
    """

    @register_to_config
    def __init__(
        self, kind: str, network: dict[str, Any], flow: dict[str, str], image_shape: tuple[int, int, int]
    ) -> None:
        super().__init__()
        kinds = {each.__name__: each for each in Network.__subclasses__()}  # of the modules that are loaded
        self.field = velocity_field(kinds[kind](**network), Flow(**flow))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Transformer2DModelOutput of the velocity at hidden_states, both (B, C, H, W), and timestep (B,) in [0, 1].

        `class_labels` (B,) int64, the number of classes being the null one, which is that of labels left out; or texts:
        `encoder_hidden_states` (B, L, E), of which `encoder_attention_mask` (B, L) count, and `pooled_projections`
        (B, P) where it takes them.
        """
        condition: Condition
        if encoder_hidden_states is None:
            null = self.config.network.get("num_classes") or 0
            condition = class_labels if class_labels is not None else timestep.new_full(timestep.shape, null).long()
        else:
            mask_BL = encoder_attention_mask
            if mask_BL is None:
                mask_BL = encoder_hidden_states.new_ones(encoder_hidden_states.shape[:2])
            condition = Text(encoder_hidden_states, mask_BL.bool(), pooled_projections)
        velocity_BCHW = self.field(hidden_states, timestep, condition)
        return Transformer2DModelOutput(sample=velocity_BCHW) if return_dict else (velocity_BCHW,)
