"""Images in: sources, decoding in a pool of processes, image sets, splits and batches.

``catalogue`` gets published data sets, ``simulate`` draws diatoms, ``corrupt`` corrupts images. Nothing is imported
here, so that a decoding process loads neither torch nor pyarrow.
"""
