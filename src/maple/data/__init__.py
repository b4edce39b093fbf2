"""What comes in: sources of images, decoding, image sets, splits, batches and the catalogue of data sets."""
