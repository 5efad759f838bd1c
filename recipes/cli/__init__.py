"""The command ``normtheory``."""

from lightning_normtheory.recipes.cli.main import main

__all__ = ["main"]
