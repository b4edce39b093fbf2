"""Small images, files and data sets for the tests of sources, decoding and splits."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

from maple.data.image_set import ImageSet


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(rng: np.random.Generator, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def write_folder(
    folder: Path, counts: dict[str, int], rng: np.random.Generator, size: tuple[int, int] = (8, 8)
) -> Path:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise(rng, size).save(folder / name / f"{i:03}.png")
    return folder


def write_parquet(path: Path, columns: dict[str, object], metadata: dict[bytes, bytes] | None = None) -> Path:
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


def write_data_root(folder: Path, rng: np.random.Generator) -> Path:
    """A data root with ``pets`` (train and test), ``birds`` (validation only) and a plain folder ``fish``."""
    for name, n in (("pets/train", 40), ("pets/test", 12), ("birds/val", 20)):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ["cat" if i % 2 else "dog" for i in range(n)]
        write_parquet(
            path,
            {"image": [encode(noise(rng)) for _ in range(n)], "label": [i % 2 for i in range(n)], "label_name": names},
        )
    return write_folder(folder / "fish", {"cod": 6, "eel": 5}, rng).parent


def write_digits(path: Path, n: int) -> Path:
    """The first ``n`` digits of scikit-learn, as a file that ``maple train`` reads."""
    digits = load_digits()
    images = np.repeat((digits.images[:n] * 15.9).astype(np.uint8)[..., None], 3, axis=-1)
    np.savez(path, images=images, labels=digits.target[:n])
    return path


def png_of_size(width: int, height: int) -> bytes:
    """A tiny PNG file whose header claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def endless_jpeg(n_scans: int = 20_000) -> bytes:
    """A JPEG file of less than 1 MB that takes minutes to decode: the last of its scans, again and again."""
    image = encode(Image.new("L", (4900, 4900), 128), "JPEG", progressive=True)
    end = len(image) - 2  # of the last scan; then comes the end of the image
    return image[:end] + n_scans * image[image.rindex(b"\xff\xda") : end] + image[end:]


def arrays(n: int, n_classes: int, seed: int = 0, name: str = "arrays") -> ImageSet:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return ImageSet.from_arrays(images, np.arange(n) % n_classes, name=name)
