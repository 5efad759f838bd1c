"""Training recipes for the papers' experiments, run with the command ``normtheory``."""
