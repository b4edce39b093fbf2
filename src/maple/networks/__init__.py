"""Networks: architectures, the backbone around them, and networks of other libraries.

``Backbone`` maps images to embeddings and logits; ``embed`` runs one over images of any source; ``open_model`` and
``wrap_backbone`` make one of a trained classifier. Names are imported on first use, so that options are read without
torch.
"""

from maple import attach_stub

__getattr__, _EXPORTS = attach_stub(__name__, __file__)
__all__ = sorted(_EXPORTS)
