"""Your own training loop with MAPLE: lines that end in # + are the additions to a plain loop.

    python examples/plain_pytorch.py

A small network learns to classify hand-written digits. After every second epoch hard classes are split into clusters;
at the end a predictor gives class, probability, uncertainty and a decision for each image.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

import maple  # +
from maple import load_splits

EPOCHS = 5
torch.manual_seed(0)
splits = load_splits("digits")
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(256, 10),
)
model = maple.wrap_backbone(model)  # +  its embedding is the input of the last linear layer
recipe = maple.MapleRecipe(relabel_every=2, hard_class_error=0.02, min_cluster_size=10)  # +
session = maple.Relabeller(recipe, splits.train.labels, n_classes=10, epochs=EPOCHS)  # +

loader = DataLoader(maple.Indexed(splits.train), batch_size=64, shuffle=True, drop_last=True)  # +  (x, y, index)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
for epoch in range(1, EPOCHS + 1):
    model.train()
    for x, _, index in loader:
        loss = session.loss(model, x, session.labels[index])  # +  instead of F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    found = session.end_epoch(epoch, model, splits.train, splits.validation, optimizer)  # +  the head grows in place
    names = [splits.class_names[c] for c in found.relabelled]  # +
    print(f"epoch {epoch}: {found.validation_accuracy:.3f} correct, {found.n_clusters} clusters, split {names}")  # +

predictor = session.fit(model, splits.train, splits.validation, splits.calibration)  # +
prediction = predictor(splits.test)  # +
accuracy = (prediction.class_id == splits.test.labels).mean()
print(f"test: {accuracy:.3f} correct, {prediction.is_ood.mean():.3f} called unknown")  # at most 0.05 on average
