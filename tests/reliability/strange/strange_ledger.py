"""What was logged beside what it should be, and a list of everything that nobody has looked at."""

import fnmatch
import math
from collections.abc import Mapping

# Metrics that no dense reference says anything about, and why.
EXPLAINED = {
    "seconds": "a clock",
    "hessian_lambda_max_seconds": "a clock",
    "ntk_seconds": "a clock",
    "batchnorm_gamma_*": "a margin, of networks of BN's form: tests/theory/theorems/test_batchnorm_margin.py",
    "batchnorm_radius_*": "BN, Theorem 2.1, as printed: tests/theory/theorems/test_batchnorm_bounds.py",
    "batchnorm_width_*": "BN, Theorem 2.1, as printed",
    "batchnorm_error_*": "BN, Theorem 2.1, as printed",
    "batchnorm_within_radii": "BN, Theorem 2.1, as printed",
    "batchnorm_epsilon_start": "of networks of BN's form: tests/theory/theorems/test_batchnorm_form.py",
    "batchnorm_input_norm": "of networks of BN's form",
    "batchnorm_shift": "of networks of BN's form",
    "batchnorm_displacement_*": "of networks of BN's form",
    "batchnorm_margin": "of networks of BN's form: tests/callbacks/test_theorem_callbacks.py",
    "batchnorm_rademacher": "of networks of BN's form: tests/theory/theorems/test_batchnorm_bounds.py",
    "batchnorm_delta_v*": "of networks of BN's form: tests/theory/theorems/test_batchnorm_bounds.py",
    "batchnorm_gd_*": "BN, Theorem 2.2, as printed, unproved",
    "progressive_*": "losses of the steps, not of the probe: tests/callbacks/test_progressive_bound.py",
    "linearity_*": "against dense derivatives in tests/callbacks/test_linearity.py",
    "predictor_*": "in NormTheory on a few samples, against dense derivatives in tests/callbacks/test_linearity.py",
    "ntk_change_bound": "LIN, Proposition 2.2: tests/theory/theorems/test_lin.py",
    "ntk_gradient_norm": "the root of a diagonal entry of the kernel: tests/callbacks/test_linearity.py",
    "weightnorm_displacement_*": "a distance from the start: tests/theory/norms/test_displacement.py",
}
# Constants of networks that are not drawn: inputs of norm 1, lengths 1/√m, factors 1/√m.
NOT_DRAWN = ("ntk_alpha", "ntk_lambda_0", "ntk_mu_0", "ntk_threshold*", "certificate_dgm_*", "dgm_*", "wn_*",
             "rsc_gamma", "rsc_beta", "rsc_*_bound", "skipped")  # fmt: skip


class Ledger:
    """The metrics of one epoch; each must be compared, bounded or explained, and none twice.

    Args:
        metrics: by name, without the prefix; those of a layer begin with ``layers/``.
    """

    def __init__(self, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        self.compared = 0
        self.differences: list[str] = []
        self._open = set(metrics)

    def __contains__(self, name: str) -> bool:
        return name in self.metrics

    def __getitem__(self, name: str) -> float:
        return self.metrics.get(name, math.nan)

    def take(self, name: str) -> float:
        """The value, which now counts as looked at."""
        if name not in self._open:
            self.differences.append(f"{name} is {'looked at twice' if name in self.metrics else 'not logged'}")
        self._open.discard(name)
        self.compared += 1
        return self[name]

    def equal(self, name: str, expected: float, tolerance: float) -> None:
        found = self.take(name)
        if not (found == expected or abs(found - expected) <= tolerance):
            self.differences.append(f"{name} is {found!r}, not {expected!r} (tolerance {tolerance:.1e})")

    def at_least(self, name: str, lowest: float, tolerance: float = 0.0) -> None:
        found = self.take(name)
        if not found >= lowest - tolerance:
            self.differences.append(f"{name} is {found!r}, below {lowest!r}")

    def holds(self, name: str, claim: bool, words: str) -> None:
        """A claim about a metric that is neither equality nor bound."""
        found = self.take(name)
        if not claim:
            self.differences.append(f"{name} is {found!r}: expected {words}")

    def require(self, claim: bool, words: str) -> None:
        """A claim about no single metric."""
        self.compared += 1
        if not claim:
            self.differences.append(words)

    def nan(self, name: str) -> None:
        found = self.take(name)
        if not math.isnan(found):
            self.differences.append(f"{name} is {found!r}, not NaN")

    def starting(self, prefix: str) -> list[str]:
        """Those that nobody has looked at yet and whose names begin so."""
        return sorted(name for name in self._open if name.startswith(prefix))

    def close(self) -> None:
        """What is left must be explained."""
        for name in sorted(self._open):
            if any(fnmatch.fnmatch(name, pattern) for pattern in EXPLAINED):
                if not self[name] >= 0:
                    self.differences.append(f"{name} is {self[name]!r}, negative or NaN")
            elif any(fnmatch.fnmatch(name, pattern) for pattern in NOT_DRAWN):
                self.differences.append(f"{name} is logged, for a network that has not its form")
            else:
                self.differences.append(f"{name} is {self[name]!r}, and nothing was compared with it")
