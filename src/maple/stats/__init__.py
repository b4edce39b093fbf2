"""Statistics on arrays: moments, Gaussians, the chi-square tail, clustering and metrics. Never torch."""
