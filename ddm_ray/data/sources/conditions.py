"""From what a source says of an image to its condition: a label of the run's classes, or a caption."""

from dataclasses import dataclass

from ddm_ray.config import DataConfig


@dataclass(frozen=True)
class Conditions:
    """What conditions of a run are: classes by name or number, or captions. `classes`: names found in the source."""

    config: DataConfig
    classes: tuple[str, ...] | None = None

    @property
    def captions(self) -> bool:
        """Whether conditions are texts."""
        return self.config.text is not None

    @property
    def needed(self) -> bool:
        """Whether the source has to say anything: of a single class all images are."""
        return self.captions or self.num_classes > 1

    @property
    def num_classes(self) -> int:
        """0 for captions."""
        return len(self.config.class_names)

    @property
    def counted(self) -> bool:
        """Whether the classes were only counted, not named."""
        return self.config.class_names == tuple(str(label) for label in range(self.num_classes))

    def of(self, found: object) -> int | str:
        """The condition that was `found`. Raises ValueError saying why it is none."""
        if self.captions:
            if not isinstance(found, str) or not found.strip():
                raise ValueError("no caption" if found is None or isinstance(found, str) else "caption is not a text")
            return _in_utf8(found.strip())
        if not self.needed:
            return 0
        if found is None or found == "":
            raise ValueError("no label")
        if isinstance(found, str):
            return self._by_name(found)
        if not isinstance(found, int):
            raise ValueError(f"label {found!r:.60} is neither a number nor a class's name")
        if not 0 <= found < self.num_classes:
            raise ValueError(f"label {int(found)} is not in 0..{self.num_classes - 1}")
        return int(found)

    def _by_name(self, found: str) -> int:
        names = self.classes or self.config.class_names
        if found in names:
            return names.index(found)
        if self.counted and self.classes is None and found.strip().lstrip("+-").isdigit():
            return int(self.of(int(found)))
        raise ValueError(f"{found!r:.60} is none of the {self.num_classes} classes")


def _in_utf8(caption: str) -> str:
    try:
        caption.encode()
    except UnicodeEncodeError:
        raise ValueError("caption is not UTF-8") from None
    return caption
