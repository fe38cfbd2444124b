import inspect

import torch

from ddm_ray.models.dit import Trunk
from ddm_ray.models.router import Router

SIZE = {
    "num_experts": 5,
    "image_size": 8,
    "channels": 1,
    "num_classes": 3,
    "patch_size": 4,
    "width": 16,
    "depth": 1,
    "heads": 2,
}


def inputs(rows: int = 6):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, 1, 8, 8, generator=generator),
        torch.rand(rows, generator=generator),
        torch.arange(rows) % 4,
    )


def test_learns_from_x_through_the_cls_token() -> None:
    torch.manual_seed(0)
    router = Router(**SIZE)
    optimizer = torch.optim.Adam(router.parameters(), lr=1e-2)
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        cluster_B = torch.randint(5, (32,), generator=generator)
        noise = 0.1 * torch.randn(32, 1, 8, 8, generator=generator)
        x_BCHW = noise + (cluster_B - 2).view(-1, 1, 1, 1)
        logits_BK = router(x_BCHW, torch.zeros(32), torch.full((32,), 3))
        loss = torch.nn.functional.cross_entropy(logits_BK, cluster_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (logits_BK.argmax(dim=1) == cluster_B).float().mean() > 0.8
    assert router.cls_D.grad is not None
    assert router.cls_D.grad.abs().max() > 0


def test_shape_and_parameters() -> None:
    router = Router(**SIZE)
    assert router(*inputs()).shape == (6, 5)
    trunk = sum(parameter.numel() for parameter in router.trunk.parameters())
    assert sum(parameter.numel() for parameter in router.parameters()) == trunk + 16 + 17 * 5
    assert router.config == {**SIZE, "mlp_ratio": 4.0, "adaln": "zero", "text_dim": None}
    assert router.config.keys() == {*inspect.signature(Trunk).parameters, "num_experts"}
