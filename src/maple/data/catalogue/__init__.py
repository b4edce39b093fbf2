"""Catalogue of published data sets: the table, the readers of their originals, download, conversion, description.

``table`` lists them, ``get`` fetches and converts one, ``describe`` says what it is and where it is looked for.
"""
