"""Training: losses, recipes, relabelling, growth of the head and the one training loop."""
