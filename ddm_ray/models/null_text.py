"""The null condition of models of texts as a file: the one row that the empty prompt is encoded to.

Shapes: L tokens of E channels, a pooled vector of P.
"""

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ddm_ray.core.condition import Text
from ddm_ray.errors import CorruptArtifact
from ddm_ray.spelling import one_line

NULL_TEXT = "null_text.safetensors"


def pack_null_text(text: Text) -> bytes:
    """A safetensors file of one row: tokens_LE, any pooled_P, and mask_L unless all tokens count."""
    assert len(text) == 1
    tensors = {"tokens_LE": text.tokens_BLE[0]}
    if text.pooled_BP is not None:
        tensors["pooled_P"] = text.pooled_BP[0]
    if not text.mask_BL.all():
        tensors["mask_L"] = text.mask_BL[0]
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def unpack_null_text(data: bytes, where: str) -> Text:
    """The text that `pack_null_text` packed. Raises CorruptArtifact naming `where` for anything else."""
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise CorruptArtifact(f"{where}: not whole safetensors ({one_line(error, 120)})") from None
    if "tokens_BLE" in tensors:  # folders exported before
        tensors = {name.replace("_B", "_"): tensor[0] for name, tensor in tensors.items()}
    tokens_LE, pooled_P = tensors.get("tokens_LE"), tensors.get("pooled_P")
    if tokens_LE is None or tensors.keys() - {"tokens_LE", "mask_L", "pooled_P"}:
        raise CorruptArtifact(f"{where}: not a text but tensors {', '.join(sorted(tensors)) or 'none'}")
    mask_L = tensors.get("mask_L", torch.ones(len(tokens_LE), dtype=torch.bool))
    axes = (tokens_LE.ndim, 1 if pooled_P is None else pooled_P.ndim)
    if axes != (2, 1) or mask_L.shape != tokens_LE.shape[:1] or not mask_L.any():
        raise CorruptArtifact(f"{where}: not a text of one token or more that counts")
    return Text(tokens_LE[None], mask_L[None], None if pooled_P is None else pooled_P[None])
