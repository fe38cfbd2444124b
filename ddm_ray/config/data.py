"""The data of a run: images or latents, what they are conditioned on, how they are embedded and clustered."""

from collections import Counter
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ddm_ray.config.strict_model import FolderName, StrictModel
from ddm_ray.core.names import FitName
from ddm_ray.plain_text import name_form

MAX_CLUSTERS = 1024


class TextConfig(StrictModel):
    """Texts as conditions: `tokens` tokens of `dim` channels from a text encoder, by its name or folder.

    `pooled_dim`: channels of one more vector for the whole text, of `pooled_encoder` or else of `encoder` itself.
    Rows that keep `ids` are hundreds of times smaller, and their trainings need the encoder, and its memory.
    """

    encoder: FolderName = Field(min_length=1, description="CLIP or T5: a folder, or a name of the hub")
    tokens: PositiveInt = Field(description="length that texts are cut or padded to; 77 is all that CLIP reads")
    dim: PositiveInt = Field(description="channels of a token, as the encoder has them: 512 or 768 of CLIP")
    pooled_dim: PositiveInt | None = Field(
        default=None, description="channels of the pooled vector; none: there is none"
    )
    pooled_encoder: FolderName | None = Field(
        default=None, min_length=1, description="encoder of the pooled vector; none: the first one's own"
    )
    stored: Literal["features", "ids"] = Field(
        default="features",
        description="what rows keep of a text: the encoder's channels, or tokens' ids, to encode beside training",
    )

    @property
    def channels(self) -> int:
        """Channels of all tokens of one text and of its pooled vector together."""
        return self.tokens * self.dim + (self.pooled_dim or 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of a text's tokens in its row at most: float16 channels, or ids of 4 bytes."""
        return self.tokens * (4 if self.stored == "ids" else 2 * self.dim)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of what its row keeps for the pooled vector."""
        if self.stored == "ids":
            return 0 if self.pooled_encoder is None else 4 * self.tokens
        return 2 * (self.pooled_dim or 0)

    @model_validator(mode="after")
    def _pooled_has_a_size(self) -> Self:
        if self.pooled_encoder is not None and self.pooled_dim is None:
            raise ValueError("pooled_encoder needs pooled_dim, the size of its vector")
        return self


class LatentsConfig(StrictModel):
    """An autoencoder (by its name or folder) that images become latents by: (encoded - shift) * scale."""

    autoencoder: FolderName = Field(
        min_length=1, description="AutoencoderKL of diffusers: a folder, or a name of the hub"
    )
    downsampling: PositiveInt = Field(default=8, description="pixels per latent, along each side")
    scale: float = Field(gt=0, description="as the autoencoder's own config has it: 0.18215 of Stable Diffusion's")
    shift: float = Field(default=0.0, description="likewise; 0 where its config has none")


class DataConfig(StrictModel):
    """The source of the images and the shape (channels, image_size, image_size) they are modelled in.

    With `latents` that is the latents' shape. Conditions are classes (`class_names`; or `num_classes`, which are
    then called "0", "1" and so on), or else `text`. Columns are parquet's, or a WebDataset's file extensions.
    """

    source: str = Field(
        default="digits",
        min_length=1,
        description="a folder, file or URI (s3://, hf://datasets/OWNER/NAME), or a name of those below",
    )
    format: str | None = Field(
        default=None, min_length=1, description="of files, one of those below; none: told by their names"
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="of a source with folders or files named train, val, test: one of them, or all",
    )
    image_column: str | None = Field(default=None, min_length=1, description="none: found by type and usual names")
    condition_column: str | None = Field(default=None, min_length=1, description="of labels or texts; none: likewise")
    duplicates: Literal["keep", "drop"] = Field(default="keep", description="files of equal bytes")
    image_size: PositiveInt = Field(
        default=8, description="side in pixels, or in latents; costs grow with its square. 32 on CPUs, 64 on a GPU"
    )
    channels: PositiveInt = Field(
        default=1, le=16, description="1 for grey, 3 for colour; the autoencoder's of latents"
    )
    class_names: tuple[str, ...] = Field(
        default=(), description="names of the classes, by label; none: see num_classes"
    )
    num_classes: PositiveInt | None = Field(
        default=None,
        description="number of classes, which then take the source's names for them; 1: all images are of one",
    )
    text: TextConfig | None = Field(default=None, description="conditions are texts; none: they are classes")
    latents: LatentsConfig | None = Field(
        default=None, description="images become latents first, for 128 pixels and more; none: pixels are modelled"
    )
    heldout: float = Field(default=0.1, ge=0.0, lt=1.0, description="share of rows kept out of training")
    fit: FitName = Field(
        default="crop", description="an image that isn't square: its middle, all of it between black bars, or distorted"
    )
    horizontal_flips: bool = Field(
        default=False,
        description="train on each image's mirror image as often as on itself: for photographs, not for letters",
    )
    crop_margin: int = Field(
        default=0,
        ge=0,
        description="pixels by which images are kept larger than image_size: each time that one is trained on, its crop"
        " is drawn; everything else sees its middle",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_and_count_the_classes(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        names, count = fields.get("class_names"), fields.get("num_classes")
        if isinstance(names, list | tuple) and names and count is None:
            return {**fields, "num_classes": len(names)}
        # A count of another type, or beyond reason, is for the field's own check to refuse.
        if not names and type(count) is int and 0 < count <= 1_000_000:
            return {**fields, "class_names": tuple(str(label) for label in range(count))}
        return fields

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.text is None) is not bool(self.class_names):
            raise ValueError("conditions are either classes (class_names or num_classes) or text: give one of the two")
        if twice := [name for name, count in Counter(map(name_form, self.class_names)).items() if count > 1]:
            raise ValueError(f"class_names: a name comes twice: {twice[0]}")
        if self.num_classes is not None and self.num_classes != len(self.class_names):
            raise ValueError(f"num_classes is {self.num_classes}, but {len(self.class_names)} class_names are given")
        if self.latents is None and self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels}: pixels have 1 or 3, others are for latents (data.latents)")
        if self.latents is not None and self.crop_margin:
            raise ValueError(f"crop_margin is {self.crop_margin}: latents are of one crop, the middle; leave it out")
        return self

    @property
    def classes_are_counted(self) -> bool:
        """True if classes are only counted, so that their names are the source's to tell."""
        return self.class_names == tuple(str(label) for label in range(len(self.class_names)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one modelled image."""
        return (self.channels, self.image_size, self.image_size)

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image in pixels: the modelled one, or what the autoencoder encodes."""
        if self.latents is None:
            return self.shape
        side = self.image_size * self.latents.downsampling
        return (3, side, side)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a row's data: `shape`, with the margin that crops are drawn from."""
        side = self.image_size + self.crop_margin
        return (self.channels, side, side)

    @property
    def decoded_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image as it is read: `pixel_shape`, with the margin that crops are drawn from."""
        return self.stored_shape if self.latents is None else self.pixel_shape

    @property
    def stores_mirrored(self) -> bool:
        """True if rows have the latents of their mirror images too, which aren't those of theirs mirrored."""
        return self.horizontal_flips and self.latents is not None

    @property
    def unaugmented(self) -> "DataConfig":
        """The configuration of images that models sample, which are of the augmented distribution already."""
        return self.model_copy(update={"horizontal_flips": False, "crop_margin": 0})


class EmbedderConfig(StrictModel):
    """An embedder of images into vectors, to be clustered or compared: PCA of pixels, or a network's pooled features.

    `model`: a timm model's name; or a folder of transformers' or a name of its hub. Images are resized and normalised
    as the network's own configuration says. `inception` is the network of the FID, as torch-fidelity has it; its
    features are comparable with published ones. `lite0` is EfficientNet-Lite0, trained on ImageNet; its weights come
    in a package (`ddm-ray[lite0]`): it needs no network.
    """

    kind: Literal["pixels", "timm", "transformers", "inception", "lite0"] = Field(
        default="pixels",
        description="pixels needs no network, nor does lite0: its weights come in a package; timm's DINOv2 tells"
        " subjects apart, not only colours",
    )
    dim: PositiveInt = Field(default=32, description="PCA components (pixels)")
    model: FolderName = Field(
        default="vit_small_patch14_dinov2.lvd142m", min_length=1, description="name of the network, or its folder"
    )
    checkpoint: FolderName | None = Field(
        default=None,
        description="file of weights, for timm safetensors; none: those that either downloads (timm, inception)",
    )
    image_size: PositiveInt | None = Field(
        default=None, description="side in pixels that images are resized to; none: the network's own (timm)"
    )
    model_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of the model's constructor")
    batch_size: PositiveInt = Field(default=256, description="images that a network sees at once; lower it for memory")

    @model_validator(mode="before")
    @classmethod
    def _size_by_its_name(cls, fields: Any) -> Any:
        """Take timm's own name for `image_size`, which older runs have."""
        if not isinstance(fields, dict) or fields.get("kind") != "timm" or fields.get("image_size") is not None:
            return fields
        arguments = fields.get("model_args")
        if not isinstance(arguments, dict) or not isinstance(arguments.get("img_size"), int):
            return fields
        others = {name: value for name, value in arguments.items() if name != "img_size"}
        return {**fields, "image_size": arguments["img_size"], "model_args": others}

    @model_validator(mode="after")
    def _size_is_of_timm(self) -> Self:
        if self.image_size is not None and self.kind not in ("timm", "lite0"):
            raise ValueError(f"image_size is for kind timm or lite0; {self.kind} has a size of its own: leave it out")
        return self

    @property
    def network(self) -> str:
        """Name of the network, or its folder."""
        return {"inception": "Inception-v3", "lite0": "tf_efficientnet_lite0"}.get(self.kind, self.model)


class PartitionConfig(StrictModel):
    """The partition of rows into clusters: two-level k-means (paper, section 4), a control, or as it is given.

    embeddings, pixels: k-means of the embeddings, or of 4x4 averages of the modelled images. random, label: controls.
    given: one shard per owner, each prepared from rows of its own that are never pooled.
    """

    num_clusters: PositiveInt = Field(
        le=MAX_CLUSTERS,
        description="K, the number of experts, of some thousand rows each; 2 to 4 on one machine, 8 is the paper's",
    )
    numbers: tuple[int, ...] = Field(
        default=(),
        description="numbers of the clusters, ascending; none: 0 to num_clusters - 1. A run keeps those of the run that"
        " it was derived from",
    )
    method: Literal["embeddings", "pixels", "random", "label", "given"] = Field(
        default="embeddings",
        description="what k-means clusters: embeddings or small pixels; random, label: controls; given: owners do",
    )
    metric: Literal["euclidean", "spherical"] = Field(
        default="euclidean", description="distance of embeddings; spherical: of their directions"
    )
    nearest: Literal["coarse", "fine"] = Field(default="coarse", description="centroid that decides a row's cluster")
    max_share: float | None = Field(default=None, gt=0, le=1, description="most of the training rows in one cluster")
    num_fine: PositiveInt = Field(default=1024, description="fine centroids, at most a few for every hundred rows")
    iterations: PositiveInt = Field(default=25, description="of k-means")
    sample_rows: PositiveInt = Field(default=1_000_000, description="most rows that the fine k-means is fitted on")
    seed: int = Field(default=0, ge=0, description="of k-means, and of method random")

    @property
    def clusters(self) -> tuple[int, ...]:
        """The numbers of the clusters. Arrays over K clusters are in this order."""
        return self.numbers or tuple(range(self.num_clusters))

    def position(self, cluster: int) -> int:
        """The place of a cluster's number among all, by which arrays over K clusters have it."""
        return self.clusters.index(cluster)

    @property
    def given(self) -> bool:
        """True where each owner prepares a shard of its own."""
        return self.method == "given"

    @property
    def by_kmeans(self) -> bool:
        """True if the partition has centroids."""
        return self.method in ("embeddings", "pixels")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_fine < self.num_clusters:
            raise ValueError(f"num_fine ({self.num_fine}) must be at least num_clusters ({self.num_clusters})")
        if list(self.numbers) != sorted({number for number in self.numbers if 0 <= number < 100_000}):
            raise ValueError("numbers: must ascend, from 0 on")
        if self.numbers and len(self.numbers) != self.num_clusters:
            raise ValueError(f"numbers: are {len(self.numbers)}, and num_clusters is {self.num_clusters}")
        if self.max_share is None:
            return self
        if not self.by_kmeans:
            raise ValueError(f"max_share balances k-means, and method is {self.method}: leave it out")
        if self.max_share * self.num_clusters < 1:
            raise ValueError(f"max_share ({self.max_share}) leaves rows over: at least 1/{self.num_clusters}")
        return self
