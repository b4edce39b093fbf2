"""Detectors: from outputs of a backbone to a score, higher for images more out-of-distribution.

``base`` is the contract and ``registry`` the list of names; ``maple`` learns a ``Learned`` record and describes images.
``logits``, ``distance`` and ``heads`` hold other families; ``gradients`` those that need torch and the images.
"""
