"""Averages of logits against a loop."""

from __future__ import annotations

import torch

from maple.baselines.base import average_logits


def test_average_against_a_loop():
    logits = 3 * torch.randn(5, 7, 4, dtype=torch.float64)
    mean = sum(sample.softmax(dim=1) for sample in logits) / 5
    energy = sum(sample.logsumexp(dim=1) for sample in logits) / 5
    averaged = average_logits(logits)
    torch.testing.assert_close(averaged.softmax(dim=1), mean)
    torch.testing.assert_close(averaged.logsumexp(dim=1), energy)
