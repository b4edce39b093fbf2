"""Search over settings of a recipe: request and plan, space, criteria, the study in Optuna, and its outcome."""
