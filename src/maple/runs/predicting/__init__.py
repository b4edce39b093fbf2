"""Commands on new images: ``predict`` with its files (``writer``, ``flagged``), ``explain`` and ``monitor``."""
