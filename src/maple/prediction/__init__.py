"""Prediction: backbone and fitted detector together, in torch or ONNX Runtime."""
