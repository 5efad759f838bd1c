"""What a strange model logs about its whole training set, of which the probe holds all samples or seven."""

import math

import torch
from torch import Tensor

from reliability.strange.strange_checks import CLOSE, Checks
from reliability.strange.strange_reference import samples_of


class EstimateChecks(Checks):
    """`Checks` of the estimates for the training set, and of λ_min of fewer samples."""

    @property
    def left_out(self) -> float:
        """The fraction of the training set that the probe does not hold."""
        return 1 - len(self.now.outputs) / self.plan.samples

    # -- gradients -----------------------------------------------------------------------------------------------------

    def training_set(self) -> None:
        """R, ‖∇L‖² and ‖ḡ‖² of the training set, from the spread of the batches."""
        names = [f"{name}_train" for name in ("grad_norm_sq", "rsc_ratio", "mean_predictor_grad_norm_sq")]
        if self.left_out == 0:
            for name in names:
                self.close(name, self.row[name.removesuffix("_train")])
                self.row.equal(f"{name}_error", 0.0, 0.0)
            return
        now = self.now
        if len(now.batches) == 1:
            self.row.require(not any(name in self.row for name in names), "one batch has no spread")
            return
        losses = torch.stack([now.loss_of([batch]) for batch in now.batches])
        gradients = torch.stack([now.gradient_of(loss, retain_graph=True) for loss in losses])
        means = torch.stack([now.jacobian_of(batch).mean((0, 1)) for batch in now.batches])
        self._estimate(names[0], gradients)
        self._estimate(names[1], gradients, losses.detach())
        self._estimate(names[2], means)

    def _estimate(self, name: str, means: Tensor, losses: Tensor | None = None) -> None:
        """Compare ‖μ‖², or ‖μ‖²/ℓ, with the one from the two means ȳ_1, ȳ_2 of shares w_1 and w_2.

        Their difference d = ȳ_1 − ȳ_2 alone tells the spread: the mean has the covariance C = w_1 w_2 d dᵀ, times the
        fraction of the set that is left out.
        """
        (first, second), f = means, self.left_out
        sizes = [samples_of(batch) for batch in self.now.batches]
        a, b = sizes[0] / sum(sizes), sizes[1] / sum(sizes)
        mean, apart = a * first + b * second, first - second
        trace = a * b * float(apart @ apart)
        value = float(mean @ mean) - f * trace
        divisor = 1.0 if losses is None else a * float(losses[0]) + b * float(losses[1])
        # Along d, ‖μ‖² rises by 2⟨ȳ, d⟩, and ‖μ‖²/ℓ by less where ℓ rises, too.
        slope = 2 * float(mean @ apart)
        if losses is not None:
            slope -= value / divisor * float(losses[0] - losses[1])
        variance = f * a * b * slope**2 + 2 * (f * trace) ** 2
        # Two normal errors are as rare as so many of a Student's variable of one degree, a Cauchy's.
        rare = torch.special.ndtr(torch.tensor(2.0, dtype=torch.float64))
        student = float(torch.distributions.Cauchy(torch.zeros_like(rare), torch.ones_like(rare)).icdf(rare)) / 2
        scale = float(means.square().sum()) / divisor + 1e-12
        self.close(name, value / divisor, scale)
        # The root of a variance of 0 is as exact as the root of the rounding.
        self.row.equal(f"{name}_error", student * math.sqrt(variance) / divisor, 1e-6 * student * scale)

    # -- curvature -----------------------------------------------------------------------------------------------------

    def bracket(self, prefix: str = "") -> None:
        """λ_max of the training set: that of the probe if it is the same; three other samples are too few."""
        name, rayleigh = f"{prefix}hessian_lambda_max", f"{prefix}hessian_rayleigh_train"
        ends = [f"{name}_lower", f"{name}_upper", rayleigh]
        if self.left_out > 0 or self.plan.epochs > 1:  # only the first of 16 measurements has it
            self.row.require(not any(end in self.row for end in ends), "there is a bracket for λ_max")
            return
        for end in ends:
            self.row.equal(end, self.row[name], 0.0)
        self.row.equal(f"{rayleigh}_error", 0.0, 0.0)

    def few_samples(self) -> None:
        """max ‖∂f/∂θ‖₂ over four samples, in the first of 16 measurements."""
        name = "predictor_gradient_norm"
        if self.plan.epochs > 1:
            self.row.require(name not in self.row, f"{name} is measured in the second epoch")
        elif not math.isnan(self.row[name]):
            self.close(name, float(torch.linalg.matrix_norm(self.held[-1].jacobian[:4], 2).max()))

    # -- the tangent kernel --------------------------------------------------------------------------------------------

    def fewer_samples(self) -> None:
        """λ_min of the kernel's first samples, where samples are independent."""
        samples, which = self.plan.options["ntk_samples"], self.plan.options["ntk_outputs"]
        kernel = self.held[-1].kernels(samples, which)["kernel"]
        n, high = len(self.held[-1].jacobian[:samples]), self.row["ntk_lambda_max"]
        if "ntk_lambda_min_half" not in self.row:
            coupled = "batch" in self.plan.norms
            self.row.require(n < 8 or coupled, "λ_min of fewer samples is not logged")
            self.row.require("ntk_lambda_min_decay" not in self.row, "there is a decay of nothing")
            return
        lowest = {}
        for part, count in {"half": n // 2, "quarter": n // 4}.items():
            rows = count * len(kernel) // n
            lowest[part] = float(torch.linalg.eigvalsh(kernel[:rows, :rows])[0])
            self.close(f"ntk_lambda_min_{part}", lowest[part], high)
        low = self.row["ntk_lambda_min"]
        above = low > self.row["ntk_lambda_min_floor"]
        self.row.require(("ntk_lambda_min_decay" in self.row) == above, "a decay where λ_min is above its floor")
        if above:
            # An error of λ_min, CLOSE times λ_max, is relative to λ_min in its logarithm.
            expected = math.log(lowest["quarter"] / low) / math.log(n / (n // 4))
            self.row.equal("ntk_lambda_min_decay", expected, CLOSE * (1 + high / low))
