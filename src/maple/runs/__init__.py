"""Runs: one file per verb, from a request to a written run folder.

``folder.RunFolder`` owns every file of a run and its lock; ``setup`` resolves options, images and the network to start
from; ``loading`` opens models and images; ``fit`` holds the last steps of every training.
"""
