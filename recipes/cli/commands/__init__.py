"""A module for each command of ``normtheory``; its `main` takes the arguments and returns the exit code."""
