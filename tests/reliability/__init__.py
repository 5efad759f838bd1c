"""Random models, faults, processes, resumed and long runs. In `tests`, ``python -m reliability`` runs them all."""

import support  # noqa: F401  so that scripts find both packages
