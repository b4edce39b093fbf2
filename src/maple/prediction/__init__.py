"""Predictors: images in, predictions out, with torch (``predictor``) or an exported graph (``onnx``).

``fit`` makes one, ``store`` saves and loads it, ``update`` adds images or classes, ``explain`` says why;
``own_loop`` and ``callback`` join the method to training loops outside the package.
"""
