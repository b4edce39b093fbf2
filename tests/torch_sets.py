"""Image sets as the data sets of torchvision give them."""

from __future__ import annotations

from PIL import Image
from torch.utils.data import Dataset

from maple.data.image_set import ImageSet


class Pictures(Dataset):
    """(picture of Pillow, label) of an image set; the classes have no names."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images.read(i)), int(self.images.labels[i])


class NamedPictures(Pictures):
    """The same with ``classes`` and ``targets``."""

    @property
    def classes(self) -> list[str]:
        return list(self.images.class_names)

    @property
    def targets(self) -> list[int]:
        return self.images.labels.tolist()
