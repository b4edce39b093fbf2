"""Images of torch data sets and loaders: what is read, what is listed, what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from maple.data.sources import open_images, open_like
from maple.data.sources.torch_data import list_torch_data
from maple.data.splits import load_splits
from maple.errors import DataError, UsageError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


class Pets(Dataset):
    """Items as a torchvision data set gives them; counts how often an image is read."""

    def __init__(self, images=PIXELS, labels=LABELS, make=Image.fromarray, transform=None):
        self.images, self.given, self.make, self.transform = images, labels, make, transform
        self.reads = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.reads += 1
        image = self.make(self.images[i])
        return (image if self.transform is None else self.transform(image)), int(self.given[i])


class ListedPets(Pets):
    classes = ["cat", "dog", "emu"]

    @property
    def targets(self):
        return list(map(int, LABELS))


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


MAKERS = {
    "picture": Image.fromarray,
    "array HWC": lambda image: image,
    "array CHW": lambda image: image.transpose(2, 0, 1),
    "uint8 tensor CHW": lambda image: torch.from_numpy(image).permute(2, 0, 1),
    "float tensor CHW": as_tensor,
    "float64 array HWC": lambda image: image / 255,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_form_of_an_image_gives_the_same_pixels(make):
    images = open_images(Pets(make=make))
    np.testing.assert_array_equal(images.pixels, PIXELS)
    np.testing.assert_array_equal(images.labels, LABELS)
    assert images.class_names == ("0", "1", "2") and images.size == 8


def test_images_are_those_of_the_same_array():
    """Also their keys, from which splits are made."""
    from maple.data.image_set import ImageSet

    ours, arrays = open_images(Pets()), ImageSet.from_arrays(PIXELS, LABELS)
    np.testing.assert_array_equal(ours.keys, arrays.keys)


@pytest.mark.parametrize("channels", [1, 4])
def test_grey_and_transparent_images(channels):
    grey = np.repeat(PIXELS[:, :, :, :1], channels, axis=3)
    grey[..., 3:] = 255
    images = open_images(Pets(grey, make=lambda image: image))
    np.testing.assert_array_equal(images.pixels, np.repeat(PIXELS[..., :1], 3, axis=3))


def test_sizes_differ_and_are_made_square():
    shapes = [(10, 6), (20, 20), (7, 9)]
    images = open_images(Pets([np.full((*shape, 3), 40, np.uint8) for shape in shapes]), size=16)
    assert images.pixels.shape == (3, 16, 16, 3) and (images.pixels == 40).all()


def test_listed_names_and_labels_need_no_image(monkeypatch):
    monkeypatch.setattr("maple.data.sources.torch_data._PROBES", 2)
    pets = ListedPets()
    listed = list_torch_data(pets, 8, "pad", labelled=True)
    assert pets.reads < len(pets)
    assert listed.class_names == ("cat", "dog", "emu")
    np.testing.assert_array_equal(listed.labels, LABELS)


def test_labels_that_a_transform_has_changed_are_read():
    pets = ListedPets(labels=LABELS + 2)  # as by a target_transform
    np.testing.assert_array_equal(open_images(pets).labels, LABELS + 2)


def test_subsets_and_concatenations_keep_names_and_labels():
    part = Subset(ListedPets(), [5, 1, 3])
    images = open_images(ConcatDataset([part, ListedPets()]))
    assert images.class_names == ("cat", "dog", "emu")
    np.testing.assert_array_equal(images.labels, [2, 1, 0, *LABELS])
    np.testing.assert_array_equal(images.pixels[:3], PIXELS[[5, 1, 3]])


def test_each_image_is_read_once_beyond_the_probes(monkeypatch):
    monkeypatch.setattr("maple.data.sources.torch_data._PROBES", 2)
    pets = Pets(np.repeat(PIXELS, 20, axis=0), np.repeat(LABELS, 20))
    open_images(pets, size=8)
    assert pets.reads <= len(pets) + 6


def test_numbers_count_the_classes_of_the_caller():
    assert open_like(Pets(), ["cat", "dog", "emu"]).class_names == ("cat", "dog", "emu")
    with pytest.raises(DataError, match="'2'"):
        open_like(Pets(), ["cat", "dog"])
    new = open_like(Pets(), ["cat", "dog"], may_be_new=True)
    assert new.class_names == ("cat", "dog", "2")


def test_tensor_data_sets():
    x = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    images = open_images(TensorDataset(x, torch.from_numpy(LABELS)))
    np.testing.assert_array_equal(images.pixels, PIXELS)
    unlabelled = open_images(TensorDataset(x), labelled=False)
    assert (unlabelled.labels == -1).all()
    assert len(open_images(TensorDataset(x, torch.zeros(12, 4)), labelled=False)) == 12  # labels are not looked at
    with pytest.raises(DataError, match="label"):
        open_images(TensorDataset(x))


def test_more_images_than_memory_are_read_again():
    images = open_images(ListedPets(), memory_limit=100)
    assert images.pixels is None
    np.testing.assert_array_equal(images.subset([7, 2]).read(0), PIXELS[7])


def test_a_broken_image_is_skipped_with_its_reason():
    def make(image):
        if (image == PIXELS[4]).all():
            raise OSError("truncated")
        return Image.fromarray(image)

    for pets in (Pets(make=make), ListedPets(make=make)):
        images = open_images(pets, size=8)
        assert len(images) == 11 and "truncated" in images.skipped[0].reason
        np.testing.assert_array_equal(images.labels, np.delete(LABELS, 4))


def test_splits_of_a_data_set():
    pixels, labels = RNG.integers(0, 256, (90, 8, 8, 3), dtype=np.uint8), np.arange(90) % 3
    splits = load_splits(Pets(pixels[:60], labels[:60]), test=Pets(pixels[60:], labels[60:]))
    np.testing.assert_array_equal(splits.test.pixels, pixels[60:])
    assert len(splits.train) + len(splits.validation) + len(splits.calibration) == 60


# --- what is refused --------------------------------------------------------------------------------------------------


class Normalize:
    """As torchvision's."""

    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]

    def __call__(self, image):
        x = as_tensor(image)
        return (x - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def test_normalised_images_are_refused_with_the_numbers_of_their_transform():
    with pytest.raises(UsageError, match=r"mean=\[0.5, 0.4, 0.3\], std=\[0.2, 0.2, 0.2\]"):
        open_images(Subset(Pets(transform=Compose(Normalize())), [1, 2]))
    with pytest.raises(UsageError, match="divide by 255"):
        open_images(Pets(transform=lambda image: as_tensor(image) * 255))


def test_a_random_transform_is_refused():
    def flip(image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image

    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"read twice.*augment"):
        open_images(Pets(transform=flip))


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(PIXELS, LABELS)


@pytest.mark.parametrize("stream", [Stream(), DataLoader(Stream())], ids=["data set", "loader"])
def test_a_stream_is_refused(stream):
    with pytest.raises(UsageError, match=r"Stream.*Parquet"):
        open_images(stream)


@pytest.mark.parametrize(
    ("item", "what"),
    [({"image": PIXELS[0]}, "dictionaries"), (("a.png", 0), "str"), ((PIXELS[0], [1, 0]), "label")],
)
def test_other_items_are_refused(item, what):
    class Odd(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return item

    with pytest.raises(UsageError, match=what):
        open_images(Odd(), size=8)


# --- loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": None}], ids=str)
def test_a_loader_gives_all_images_in_the_order_of_its_data_set(how):
    images = open_images(DataLoader(ListedPets(), **{"batch_size": 5, **how}))
    np.testing.assert_array_equal(images.pixels, PIXELS)


def test_a_loader_of_some_rows_is_a_subset():
    images = open_images(DataLoader(ListedPets(), sampler=SubsetRandomSampler([7, 2])))
    np.testing.assert_array_equal(images.pixels, PIXELS[[2, 7]])


def test_loaders_of_which_more_matters_are_refused():
    with pytest.raises(UsageError, match=r"WeightedRandomSampler.*Subset"):
        open_images(DataLoader(Pets(), sampler=WeightedRandomSampler([1.0] * 12, 12)))
    with pytest.raises(UsageError, match="collate_fn"):
        open_images(DataLoader(Pets(), collate_fn=lambda items: default_collate(items)))


def test_opening_images_does_not_import_torch():
    code = "import sys, maple; maple.open_images('digits'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
