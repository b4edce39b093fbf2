"""MAPLE in a Lightning training: lines that end in # + are the additions.

    pip install -c constraints.txt '.[lightning]'
    python examples/lightning_callback.py

The callback replaces the labels of each batch by pseudo-labels, splits hard classes after every second epoch, and fits
the predictor at the end.
"""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

import maple  # +

EPOCHS = 5


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = maple.create_backbone("resnet9", n_classes=10)  # +  or maple.wrap_backbone(model)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, _ = batch  # y are pseudo-labels
        return callback.session.loss(self.backbone, x, y)  # +  or any loss of yours

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
pl.seed_everything(0, verbose=False)
splits = maple.load_splits("digits")
loader = DataLoader(maple.Indexed(splits.train), batch_size=64, shuffle=True, drop_last=True)  # +  (x, y, index)
recipe = maple.MapleRecipe(relabel_every=2, hard_class_error=0.02, min_cluster_size=10)  # +
callback = maple.MapleCallback(recipe, splits.train, splits.validation, splits.calibration)  # +

trainer = pl.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    callbacks=[callback],  # +
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), loader)

for found in callback.history:  # +
    print(f"epoch {found.epoch}: {found.validation_accuracy:.3f} correct, {found.n_clusters} clusters")  # +
prediction = callback.predictor(splits.test)  # +
accuracy = (prediction.class_id == splits.test.labels).mean()
print(f"test: {accuracy:.3f} correct, {prediction.is_ood.mean():.3f} called unknown")
