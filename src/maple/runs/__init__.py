"""Runs: one file per verb, from a request to a written run folder.

``folder.RunFolder`` owns every file of a run and its lock; ``setup`` resolves options, images and the network to start
from; ``loading`` and ``provenance`` hold what several verbs share.
"""
