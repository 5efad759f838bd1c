"""Stock training recipes, run with the command ``normtheory``."""
