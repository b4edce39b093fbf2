"""The Triton repository: its configuration is valid, complete, and true of the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commands import flat, run
from exported import pictures
from maple.deploy.graph import OUTPUTS
from maple.deploy.triton import TYPES, model_path
from maple.errors import UsageError
from maple.networks import embed
from maple.reporting.gallery import write_cluster_gallery

# Fields of inference.ModelConfig (triton-inference-server/common, protobuf/model_config.proto) that we use.
STRING, INT32, INT64, UINT64, BOOL = 9, 5, 3, 4, 8
MESSAGES: dict[str, dict[str, Any]] = {
    "ModelTensorReshape": {"shape": [INT64]},
    "ModelInput": {
        "name": STRING, "data_type": "DataType", "dims": [INT64], "reshape": "ModelTensorReshape", "optional": BOOL,
    },
    "ModelOutput": {
        "name": STRING, "data_type": "DataType", "dims": [INT64], "reshape": "ModelTensorReshape",
        "label_filename": STRING,
    },
    "ModelDynamicBatching": {"preferred_batch_size": [INT32], "max_queue_delay_microseconds": UINT64},
    "ModelConfig": {
        "name": STRING, "platform": STRING, "backend": STRING, "max_batch_size": INT32, "input": ["ModelInput"],
        "output": ["ModelOutput"], "dynamic_batching": "ModelDynamicBatching",
    },
}  # fmt: skip
DATA_TYPES = ("TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_INT64", "TYPE_FP32", "TYPE_FP64")


def parse(text: str) -> Any:
    """A configuration by protobuf itself, which refuses unknown fields and values."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    enum = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        enum.value.add(name=name, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            of, label = (kind[0], 3) if isinstance(kind, list) else (kind, 1)
            added = message.field.add(name=field, number=number, label=label)
            if isinstance(of, str):
                added.type, added.type_name = (14 if of == "DataType" else 11), f".inference.{of}"
            else:
                added.type = of
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()
    return text_format.Parse(text, config)


@pytest.fixture(scope="module")
def run_folder(predictor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "line3"
    predictor.save(folder)
    train = pictures(160)
    outputs = replace(embed(predictor.backbone, train), labels=train.labels, cluster_ids=train.labels)
    outputs = replace(outputs, cluster_to_class=np.arange(4))
    write_cluster_gallery(folder / "gallery", train, outputs, per_cluster=4)
    return folder


@pytest.mark.parametrize("preprocess", [False, True])
def test_the_configuration_is_that_of_the_graph(run_folder, preprocess, tmp_path, onnx):
    import onnxruntime

    options = ["--preprocess"] if preprocess else []
    assert run("export", run_folder, "--triton", tmp_path / "models", *options) == 0
    model = tmp_path / "models" / "line3"
    written = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    assert written == {"config.pbtxt", "labels.txt", "1/model.onnx"}
    config = parse((model / "config.pbtxt").read_text())
    assert (config.name, config.backend) == ("line3", "onnxruntime") and config.max_batch_size > 1
    assert (model / "labels.txt").read_text().split() == ["a", "b", "c", "d"]
    (images,) = config.input  # Triton refuses an optional one, such as false_alarm, in a model with batches
    assert images.name == "images" and list(images.dims) == ([8, 8, 3] if preprocess else [3, 8, 8])
    assert not images.optional
    assert [each.name for each in config.output] == list(OUTPUTS)
    # As Triton calls it: a batch dimension in front of all, and reshaped tensors without another.
    session = onnxruntime.InferenceSession(model / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    dtype = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64}
    given = {}
    for each in config.input:
        kind = dtype[DATA_TYPES[each.data_type]]
        given[each.name] = np.zeros((5, *(each.reshape.shape if each.HasField("reshape") else each.dims)), kind)
    found = {each.name: each for each in session.get_outputs()}
    for said, each in zip(session.run(None, given), config.output, strict=True):
        shape = each.reshape.shape if each.HasField("reshape") else each.dims
        assert said.shape == (5, *shape) and TYPES[found[each.name].type] == DATA_TYPES[each.data_type]


def test_one_place_to_write_to(run_folder, tmp_path, capsys):
    assert run("export", run_folder) == 2
    assert run("export", run_folder, tmp_path / "a.onnx", "--triton", tmp_path) == 2
    assert flat(capsys.readouterr().err).count("--triton") == 2 and not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="my run"):
        model_path(tmp_path, tmp_path / "my run")
