"""Methods of other papers that change how a network learns: one file each, recipe and head.

The registry of recipes finds them by name (:func:`maple.training.recipe.create_recipe`).
"""
