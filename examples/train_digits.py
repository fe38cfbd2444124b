"""Train a mixture of diffusion experts on handwritten digits: the whole method on one page, without Ray.

You learn the four parts. K-means cuts the images into shards. An expert learns to denoise one shard and never sees the
others. A router learns which shard a noised image comes from. A strategy mixes the experts into one model.

    python examples/train_digits.py               # writes digits.png and the folder digits-mixture
    python examples/train_digits.py --steps 20    # a few seconds: everything runs, but the digits are blurs

It needs the extra `data`. `ddm sample digits-mixture` and other examples open the folder.
Letters at the end of a name are axes: N images, B of them in a batch, K experts, C classes, P pixels.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from ddm_ray.core.flow import interpolate, velocity
from ddm_ray.core.kmeans import assign, two_level_kmeans
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000, help="training steps of each network")
parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture and the mixture")
args = parser.parse_args()
EXPERTS, CLASSES, NO_CLASS, BATCH = 4, 10, 10, 64
torch.manual_seed(0)
torch.set_num_threads(1)  # so small a network is faster on one core than on several

# 1. Cut the images into shards.
pixels_NP, labels = load_digits(return_X_y=True)
data_NCHW, label_N = torch.tensor(pixels_NP / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(labels)
centroids = two_level_kmeans(pixels_NP, num_fine=64, num_clusters=EXPERTS, iterations=20, seed=0)
cluster_N = torch.tensor(assign(pixels_NP, centroids.coarse_KD))
rows = TensorDataset(data_NCHW, label_N, cluster_N)
shards = [TensorDataset(*rows[cluster_N == k]) for k in range(EXPERTS)]


# 2. Train. No network needs another, so each of them could train on a machine of its own.
def train(network: nn.Module, rows: TensorDataset) -> nn.Module:
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps)
    for _ in range(args.steps):
        data, label_B, cluster_B = rows[torch.randint(len(rows), (BATCH,))]
        noise, t_B = torch.randn_like(data), torch.rand(BATCH)  # at t = 0 all is data, at t = 1 all is noise
        label_B = torch.where(torch.rand(BATCH) < 0.1, NO_CLASS, label_B)
        output = network(interpolate(data, noise, t_B), t_B, label_B)
        if isinstance(network, Router):
            loss = cross_entropy(output, cluster_B)
        else:
            loss = mse_loss(output, velocity(data, noise))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"{type(network).__name__}: {len(rows)} images, last loss {loss.item():.2f}", flush=True)
    return network.eval()


shape = {"image_size": 8, "channels": 1, "num_classes": CLASSES, "patch_size": 4}
experts = [train(DiT(**shape, width=96, depth=2, heads=4), shard) for shard in shards]
router = train(Router(**shape, num_experts=EXPERTS, width=32, depth=1, heads=2), rows)

# 3. Mix. A mixture also needs p(k | class), and p(k) in the last line: here by counts of rows.
counts_CK = torch.bincount(label_N * EXPERTS + cluster_N, minlength=CLASSES * EXPERTS).view(CLASSES, EXPERTS)
info = MixtureInfo.from_counts(torch.cat([counts_CK, counts_CK.sum(dim=0, keepdim=True)]), (1, 8, 8))
pipeline = DDMPipeline(Models(info, experts, router), class_names="0123456789")
pipeline.save_pretrained(args.out / "digits-mixture", overwrite=True)

# 4. Sample. `once` draws one expert for an image, `full` mixes all of them at each step.
lines = [GridRow(f"shard {k}", shard[:20][0]) for k, shard in enumerate(shards)]
for strategy in ("once", "full"):
    output = pipeline([*"0123456789"], num_images_per_prompt=2, seeds=0, strategy=strategy, output_type="pt")
    lines.append(GridRow(strategy, 2 * output.images - 1))
grid(lines).save(args.out / "digits.png")
