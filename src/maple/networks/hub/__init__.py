"""Opening trained networks by name, file, folder or function: :func:`open_model`, one file per kind of source.

The makeup of a network is recorded as ``Backbone.origin``, from which ``rebuild_model`` makes the same layers again
without a download: a run contains all tensors itself.

Nothing that runs code is opened unless the caller passes ``trust=True`` (``--trust``): a TorchScript or
``torch.export`` file is a program, and ``python:`` imports a module.
"""

from maple.networks.hub._onnx import OnnxBackbone
from maple.networks.hub._open import GRAPHS, find_kind, needs_weights, open_model, rebuild_model
