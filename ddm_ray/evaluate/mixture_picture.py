"""The mixture at work in one picture: what each expert was trained on, real images, and which expert painted what.

Shapes: B images, CHW image, S steps, K experts.
"""

import torch
from PIL import Image
from torch import Tensor

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.apart import RARE
from ddm_ray.evaluate.candidates import Candidate, Decode, Lineup
from ddm_ray.evaluate.figures import shown_beside
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.pictures.images import to_pil, to_unit
from ddm_ray.pictures.tiles import Tile, TileLine, TilePicture
from ddm_ray.run.graph import MONOLITH, PARTITION
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.trace import HUES

PER_CLASS = 2
MAX_EXPERTS = 8
"""Experts that have a line with images of their own."""
FOOTNOTE = (
    "Frame: the expert that painted most of the image. Strip below: the expert at work in each step, from pure noise"
    " (left) to the finished image (right), by the strategy {strategy}."
)
FOOTNOTE_OF_ONE = "Frame: the expert that painted the image. By the strategy once, the router draws one for all steps."


def mixture_picture(
    run: Run, lineup: Lineup, seen: RealRows, request: SampleRequest, decode: Decode, strategy: str, sentence: str
) -> Image.Image:
    """Draw it for the mixture under this strategy, and for the monolith if it is in the lineup.

    `seen`: real rows as images. `sentence`: what the picture shows, in words.
    """
    shown, real_BCHW, names = shown_beside(run.named, seen.shown, request, PER_CLASS)
    info = PartitionInfo.of(run.require(PARTITION))
    label_B = shown.condition if names and isinstance(shown.condition, Tensor) else None
    trained = []
    clusters = run.config.partition.clusters
    for expert, cluster in enumerate(clusters[:MAX_EXPERTS]):
        tiles, words = _own_tiles(seen.train, expert, label_B, len(shown.seeds))
        note = f"{info.rows_K[expert]:,} images"
        trained.append(TileLine(f"expert {cluster}", note, tiles, _colour(expert), words))
    painted = [TileLine("real", "", [Tile(image) for image in to_pil(to_unit(real_BCHW))])]
    painted += [_painted(each, shown, decode) for each in lineup.candidates if each.name in (MONOLITH, strategy)]
    number = lineup.mixture.info.num_experts
    more = "" if number <= MAX_EXPERTS else f" (the first {MAX_EXPERTS} of {number})"
    return TilePicture(
        f"{number} experts, each trained alone on its own images, paint together",
        sentence,
        [(f"What each expert was trained on{more}", trained), ("Real images, and painted ones", painted)],
        FOOTNOTE_OF_ONE if strategy == "once" else FOOTNOTE.format(strategy=strategy),
        names or (),
        len(shown.seeds),
        HUES,
        clusters,
    ).draw()


def _own_tiles(rows: Rows, expert: int, label_B: Tensor | None, count: int) -> tuple[list[Tile | None], list[str]]:
    """Images of the expert's cluster for each column: of its label, if there are any, or spread over all.

    Of a label that is rare in the cluster there is one image. The words say, by label, how many there are.
    """
    own = rows.cluster_N == expert
    tiles, words = list[Tile | None](), list[str]()
    labels_B = torch.zeros(count, dtype=torch.int64) if label_B is None else label_B
    for label, columns in zip(
        *(each.tolist() for each in labels_B.unique_consecutive(return_counts=True)), strict=True
    ):
        members = torch.nonzero(own if label_B is None else own & (rows.label_N == label))[:, 0]
        is_rare = label_B is not None and len(members) <= RARE * int((rows.label_N == label).sum())
        most = min(1 if is_rare else columns, len(members))
        words.append(f"{len(members)} in all" if len(members) else "none")
        few = members[torch.linspace(0, len(members) - 1, most).round().long()]
        images = to_pil(to_unit(rows.data_NCHW[few]))
        tiles += [Tile(image, _colour(expert)) for image in images]
        tiles += [None] * (columns - len(images))
    return tiles, words


def _painted(candidate: Candidate, shown: SampleRequest, decode: Decode) -> TileLine:
    sampled = candidate.sample(shown)
    images = to_pil(to_unit(decode(sampled.images_BCHW)))
    number = candidate.models.info.num_experts
    if number == 1:
        return TileLine(candidate.name, "one network, all images", [Tile(image) for image in images])
    share_BSK = sampled.routing_SBK.double().cpu().numpy().transpose(1, 0, 2)
    most_B = share_BSK.sum(axis=1).argmax(axis=1).tolist()
    tiles = [Tile(image, _colour(most), share) for image, most, share in zip(images, most_B, share_BSK, strict=True)]
    return TileLine("mixture", f"of the {number} experts", tiles)


def _colour(expert: int) -> str:
    return HUES[expert % len(HUES)]
