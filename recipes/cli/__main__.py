"""``python -m lightning_normtheory.recipes.cli``."""

import sys

from lightning_normtheory.recipes.cli import main

sys.exit(main())
