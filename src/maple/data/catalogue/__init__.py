"""Catalogue of published data sets: the table, the readers of their originals, download and conversion.

``table`` lists them; ``get`` describes, fetches and converts one.
"""
