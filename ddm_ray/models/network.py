"""The interface of networks beside their forward pass, so that nothing else need know their kinds.

A kind of denoiser is a subclass, its settings, and a line of `config.networks.NETWORKS`.
"""

from inspect import Parameter, signature
from typing import Any, ClassVar

from torch import nn


class Network(nn.Module):
    """A network (x_BCHW, t_B in [0, 1], condition) -> what it predicts; `config` keeps its constructor's arguments.

    `text_dim`: channels of the texts' tokens that it is conditioned on, `pooled_dim` of one more vector for each text;
    None: it takes labels, or no vector. Blocks that are alike lie in lists: each is compiled, and moved, by itself.
    `adapter`: rank, alpha and targets of the adapter that it has; None: none. `base`: the network that an adapted one
    shares all other tensors with.
    """

    config: dict[str, Any]
    adapter: dict[str, Any] | None = None
    base: "Network | None" = None
    text_dim: int | None = None
    pooled_dim: int | None = None
    parts: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes with arguments that it takes as its own, beside those that its constructor names."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Arguments that may be left out, with their values."""
        takes = [each for part in (cls, *cls.parts) for each in signature(part).parameters.values()]
        return {each.name: each.default for each in takes if each.default is not Parameter.empty}


def checkpoint_activations(model: nn.Module, on: bool = True) -> None:
    """Have a network keep fewer activations in training and compute them twice, if any part of it can.

    Losses and gradients stay what they are; a switch of modules, which diffusers names like this, no part of a spec.
    """
    switch = "enable_gradient_checkpointing" if on else "disable_gradient_checkpointing"
    for module in model.modules():
        if callable(turn := getattr(module, switch, None)):
            turn()


def fill_tables(model: nn.Module) -> None:
    """Fill buffers that are computed and not saved, by `fill_table` of the modules that have one."""
    for module in model.modules():
        if callable(fill := getattr(module, "fill_table", None)):
            fill()
