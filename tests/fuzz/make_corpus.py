"""Write the corpus of the fuzzer anew: a few small files of each format that maple reads.

    python tests/fuzz/make_corpus.py

Files such as ``found-1~a.png`` are inputs that once failed; they stay. The files of a run are not here: the
fuzzer takes those of ``tests/samples/run_format2``.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from onnx import TensorProto, helper
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from image_files import encode, noise
from maple.files import save_arrays
from maple.prediction.onnx import METADATA, write_metadata
from maple.training.resume import Checkpoint
from maple.types import PREDICTION_COLUMNS, Relabelling
from serving import Colours

CORPUS = Path(__file__).with_name("corpus")
RNG = np.random.default_rng(0)
SMALL = noise(RNG, (12, 9))


def images() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "ppm": "PPM"}
    found = {f"plain.{suffix}": encode(SMALL, kind) for suffix, kind in kinds.items()}
    found["progressive.jpg"] = encode(SMALL, "JPEG", progressive=True, exif=exif)
    found["cmyk.jpg"] = encode(SMALL.convert("CMYK"), "JPEG")
    found["palette.png"] = encode(SMALL.convert("P"), transparency=0)
    found["deep.png"] = encode(Image.fromarray(RNG.integers(0, 60_000, (5, 7)).astype(np.uint16)))
    found["lossless.webp"] = encode(SMALL.convert("RGBA"), "WEBP", lossless=True, exif=exif)
    found["frames.gif"] = encode(SMALL, "GIF", save_all=True, append_images=[SMALL.rotate(90)])
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        found[f"{compression}.tif"] = encode(SMALL, "TIFF", compression=compression)
    found["fax.tif"] = encode(SMALL.convert("1"), "TIFF", compression="group4")
    found["float.tif"] = encode(Image.fromarray(RNG.random((4, 4)).astype(np.float32)), "TIFF")
    return found


def tables() -> dict[str, bytes]:
    encoded = [encode(SMALL), encode(SMALL, "JPEG"), None]
    named = [{"bytes": data, "path": "a.png"} for data in encoded]
    features = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    tables = {
        "plain.parquet": pa.table({"image": encoded, "label": [0, 1, 0]}),
        "named.parquet": pa.table({"img": named, "label": [0, 1, 0], "label_name": ["cat", "dog", "cat"]}),
        "hugging.parquet": pa.table({"image": named, "label": [0, 1, 0]}).replace_schema_metadata(
            {b"huggingface": json.dumps(features).encode()}
        ),
    }
    found = {}
    for name, table in tables.items():
        pq.write_table(table, file := io.BytesIO(), compression="none")
        found[name] = file.getvalue()
    pixels = RNG.integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    for name, arrays in {
        "plain.npz": {"images": pixels, "labels": [0, 1, 0, 1], "class_names": ["a", "b"]},
        "grey.npz": {"x": pixels[..., 0] / 255, "y": np.array(["a", "b", "a", "b"])},
    }.items():
        np.savez(file := io.BytesIO(), **arrays)
        found[name] = file.getvalue()
    return found


def lists() -> dict[str, bytes]:
    choice = {"choices": ["cat"]}
    tasks = [
        {
            "data": {"image": "/data/local-files/?d=a.png"},
            "annotations": [{"result": [{"value": choice}]}],
        },
        {"image": "b.png", "class": "dog", "file": "b.png"},
    ]
    return {
        "comma.csv": b"file,label\na.png,cat\nb.png,dog\n",
        "semicolon.csv": '\ufefffile;label;note\r\na.png;cat;"x\ny"\r\n'.encode(),
        "tasks.json": json.dumps(tasks).encode(),
    }


def configs() -> dict[str, bytes]:
    with zipfile.ZipFile(Path(__file__).parents[1] / "samples" / "run_format2" / "maple.zip") as run:
        return {"config.toml": run.read("config.toml")}


def plugins() -> dict[str, bytes]:
    text = """
[data.pond]
title = "Diatoms of our pond"
path = "pond"
licence = "CC0"

[suites.pond]
source = "pond"
test = "pond/test"
columns = "accuracy auroc/debris"
near = ["debris"]
[suites.pond.ood]
debris = "simulated-diatoms/far"
[suites.pond.flags]
epochs = 2
[[suites.pond.rows]]
name = "MAPLE"
"""
    return {"lab.toml": text.encode()}


def checkpoints() -> dict[str, bytes]:
    one = np.zeros(2, dtype=np.int64)
    made = Checkpoint(
        history=[{"epoch": 1, "loss": 0.5}],
        snapshots={"before": np.zeros((2, 3), np.float32)},
        snapshot_epochs={"before": 1},
        relabelling=Relabelling(one, np.array([0]), np.array([0]), np.ones(1)),
        weights={"head.weight": torch.zeros(2, 3)},
        optimizer={"head.weight": {"momentum_buffer": torch.zeros(2, 3)}},
        options={"epochs": 2, "recipe": "maple"},
        data="7e75cdbb",
    )
    return {"resume.safetensors": _written(made.save, "resume.safetensors")}


def _written(write: object, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)  # type: ignore[operator]
        return (Path(folder) / name).read_bytes()


def weights() -> dict[str, bytes]:
    torch.save({"state_dict": {"module.a": torch.zeros(2, 2)}, "epoch": 3}, file := io.BytesIO())
    arrays = {"head.weight": np.zeros((2, 3), np.float32)}
    return {
        "checkpoint.pth": file.getvalue(),
        "plain.safetensors": _written(lambda path: save_arrays(path, arrays, {}), "plain.safetensors"),
    }


def graphs() -> dict[str, bytes]:
    """A graph of constants, with the metadata of a predictor."""
    said = write_metadata(Colours(), preprocess=True, exemplars={0: RNG.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)})
    sizes = {"log_probabilities": [None, 3]}
    names = [
        *("class_id", "score", "typicality", "p_value", "is_ood", "cluster", "md_class_id", "softmax_class_id"),
        *("log_probabilities", "position"),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, [None])) for name in names]
    nodes = [helper.make_node("Constant", [], [name], value_floats=[0.0]) for name in names]
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, [None, 8, 8, 3])
    graph = helper.make_graph(nodes, "constant", [images], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.helper.set_model_props(model, {METADATA: said})
    return {"metadata.json": said.encode(), "constant.onnx": model.SerializeToString()}


def bodies() -> dict[str, bytes]:
    image, text = encode(SMALL), base64.b64encode(encode(SMALL, "JPEG")).decode()
    start = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n'
    part, coded = start + b"\r\n%s\r\n", start + b"Content-Transfer-Encoding: base64\r\n\r\n"
    return {
        "raw": b"image/png\n" + image,
        "form": b"multipart/form-data; boundary=x\n" + part % image + part % b"text" + b"--x--\r\n",
        "coded": b"multipart/form-data; boundary=x\n" + coded + text.encode() + b"\r\n--x--\r\n",
        "json": b"application/json\n" + json.dumps({"images": [{"name": "a", "data": text}, {"data": ""}]}).encode(),
    }


def predictions() -> dict[str, bytes]:
    own = {"class": "cat", "is_ood": True, "cluster": 0, "md_class": "cat", "prediction_set": ["cat", "dog"]}
    rows = [{**dict.fromkeys(PREDICTION_COLUMNS, 0.25), **own, "file": f"{i}.png"} for i in range(3)]
    lines = [{**row, "prediction_set": "cat|dog"}.values() for row in rows]
    csv = "\n".join([",".join(rows[0]), *(",".join(map(str, line)) for line in lines)])
    pq.write_table(pa.Table.from_pylist(rows), file := io.BytesIO(), compression="none")
    columns = b"file,label,is_label_issue,label_quality,predicted_label,probability,split\n"
    labels = columns + b"a.png,cat,False,0.5,dog,0.5,test\n"
    return {
        "predictions.csv": csv.encode(),
        "predictions.jsonl": b"\n".join(json.dumps(row).encode() for row in rows),
        "predictions.parquet": file.getvalue(),
        "labels.csv": labels,
    }


def archives() -> dict[str, bytes]:
    found = {}
    for kind in ("w", "w:gz", "w:xz"):
        with tarfile.open(fileobj=(file := io.BytesIO()), mode=kind) as tar:
            for name in ("cats/1.txt", "cats/2.txt"):
                info = tarfile.TarInfo(name)
                info.size = 4
                tar.addfile(info, io.BytesIO(b"purr"))
        found[f"pets.tar{kind[1:].replace(':', '.')}"] = file.getvalue()
    with zipfile.ZipFile(file := io.BytesIO(), "w") as packed:
        packed.writestr("cats/1.txt", "purr")
        packed.writestr("cats/2.txt", "purr" * 50, zipfile.ZIP_DEFLATED)
    return found | {"pets.zip": file.getvalue()}


KINDS = (images, tables, lists, configs, plugins, checkpoints, weights, graphs, bodies, predictions, archives)


def main() -> None:
    for kind in KINDS:
        folder = CORPUS / kind.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.startswith("found-"):
                path.unlink()
        for name, data in kind().items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
