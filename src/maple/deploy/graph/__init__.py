"""A predictor as one graph of tensor operations that ONNX also has: images in, all parts of a prediction out.

:class:`PredictorGraph` computes what :meth:`maple.prediction.predictor.Predictor.predict_described` computes.
Nothing is learned here: all constants come from a fitted predictor. NumPy is the reference, and
:mod:`maple.deploy.parity` checks against it. Letters for shapes are those of :mod:`maple.types`.

A node costs microseconds whatever it computes, and constants of a hundred kilobytes cost as much, because convolutions
have filled the cache. The graph is therefore small:

- products with embeddings are in float32 if that is exact enough, everything else in float64 (``distances``);
- squared distances to all clusters are one more product (``distances``);
- the chi-square tail is one sum of exponentials (``distances``);
- the fused score, linear between knots, is one sum of ramps (``scores``);
- p-values are looked up in a sorted table by comparisons (``decision``).
"""

from maple.deploy.graph.predictor_graph import OUTPUTS, DescriptionGraph, PredictorGraph
