"""Search over settings of a recipe: request, plan and space, criteria, the study in Optuna, and its outcome."""
