"""What a strange model logs about generalization and convergence: what it must equal, and what it must exceed."""

import itertools
import math

import torch

from reliability.strange.strange_checks import CLOSE, EPS
from reliability.strange.strange_estimates import EstimateChecks


class BoundChecks(EstimateChecks):
    """`Checks` of the theorems' numbers."""

    # -- generalization ------------------------------------------------------------------------------------------------

    def generalization(self) -> None:
        dense = self.predicting[-1]
        train = dense.loss
        if self.plan.validation:
            with torch.no_grad():
                unseen = float(dense.loss_of(self.model.validation_probe()))
            self.close("generalization_train_loss", train)
            self.close("generalization_validation_loss", unseen)
            self.close("generalization_gap", unseen - train, abs(unseen) + train)
        if math.isnan(self.row["rademacher_bound"]):
            self.row.nan("rademacher_bound")
            return
        self.row.at_least("rademacher_bound", self._complexity_of_one(), EPS)
        key = "x" if self.plan.dict_batches else 0
        inputs = [batch[key].flatten(1) for batch in dense.batches]
        # Tokens are unit vectors.
        norms = [(x if x.is_floating_point() else torch.ones_like(x).double()).norm(dim=1).max() for x in inputs]
        self.close("rademacher_x_norm", float(max(norms)))
        if "generalization_bound" in self.row:
            self._generalization_bound(train)

    def _complexity_of_one(self) -> float:
        """Σ_h E|(1/n) Σ_i ε_i f_h(x_i)| over all signs: a class that holds the network has no smaller complexity."""
        outputs = self.predicting[-1].outputs
        if len(outputs) < self.plan.samples:
            return 0.0  # n of the bound is another
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(outputs) - 1)), dtype=torch.float64)
        sums = signs @ outputs[1:] + outputs[0]  # a sign for all of them changes nothing
        return float(sums.abs().mean(0).sum()) / len(outputs)

    def _generalization_bound(self, train: float) -> None:
        bound, fixed = self.row["generalization_bound"], self.row["generalization_bound_fixed_radii"]
        batch_norm = "batch" in self.plan.norms
        self.row.at_least("generalization_bound_fixed_radii", 2 * self._complexity_of_one() * self._slope())
        self.row.at_least("generalization_bound", max(fixed, self.row["generalization_gap"] or 0.0))
        known = None if batch_norm and not self.plan.validation else train
        if known is not None:
            self.close("population_loss_bound", known + bound)
        vacuous = float(not (known or 0.0) + bound < self._loss_of_zero())
        self.row.equal("generalization_bound_vacuous", vacuous, 0.0)

    def _slope(self) -> float:
        """What the loss's Lipschitz constant is at least, where the bound multiplies the complexity by it."""
        return {"square": 0.0, "mse": 0.0, "cross entropy": math.sqrt(2), "logistic": 1.0}[self.plan.loss]

    def _loss_of_zero(self) -> float:
        if self.plan.loss == "cross entropy":
            return math.log(self.plan.outputs)
        if self.plan.loss == "logistic":
            return math.log(2)
        y = torch.cat([batch["y"] if self.plan.dict_batches else batch[-1] for batch in self.now.batches])
        return self._scale * float(y.square().sum(1).mean())

    @property
    def _scale(self) -> float:
        """s of s (1/n) Σ ‖f − y‖²."""
        return 1 / self.plan.outputs if self.plan.loss == "mse" else 1.0

    # -- convergence ---------------------------------------------------------------------------------------------------

    def certificate(self) -> None:
        if "certificate_ntk" in self.row:
            self._kernel_condition()
        if "certificate_beta" in self.row:
            self._descent()
        if "rho_1" in self.row:
            self._radii()

    def _kernel_condition(self) -> None:
        k, asked = self.plan.outputs, self.plan.options["ntk_samples"]
        samples = asked if k == 1 else max(asked // k, 1)
        kernel = self.held[-1].kernels(samples, "full")["kernel"]
        n = len(kernel) // k
        spectrum = torch.linalg.eigvalsh(kernel)
        high = float(spectrum[-1])
        margin = float(spectrum[0]) - (1 + len(kernel)) * EPS * high
        self.row.holds(
            "certificate_ntk",
            self.row["certificate_ntk"] == float(self.row["certificate_ntk_margin"] > 0),
            "1 where the margin is positive",
        )
        self.close("certificate_ntk_margin", margin, high)
        self.close("certificate_ntk_ratio_bound", 4 * self._scale / n * max(margin, 0.0), high)
        self.close("ntk_mean_grad_norm_sq", float(kernel.sum()) / (n * k) ** 2, high)
        self.close("ntk_mean_grad_norm_sq_bound", max(float(spectrum[0]), 0.0) / (n * k), high)

    def _descent(self) -> None:
        row, dense = self.row, self.now
        beta, step = row["certificate_beta"], row["certificate_step"]
        gradient, loss = dense.gradient, dense.loss
        squares = float(gradient.square().sum())
        curvature = float(torch.linalg.eigvalsh((dense.hessian + dense.hessian.t()) / 2).abs().max())
        row.at_least("certificate_beta", curvature, CLOSE * curvature)
        self.close("certificate_step", 1 / beta)
        self.close("certificate_rho_2", math.sqrt(squares) / beta, math.sqrt(squares) / beta + 1e-12)
        after = dense.moved(-step * gradient)
        row.require(("certificate_alpha" in row) == (self.plan.loss in ("square", "mse")), "the square loss has an α")
        for name in ("certificate_alpha", "rsc_alpha"):
            if name in row:
                lowest = loss - step * squares + row[name] / 2 * step**2 * squares
                row.holds(name, after >= lowest - CLOSE * loss, f"L⁺ = {after} ≥ {lowest}")
        self.close("certificate_rate", 1 - squares / loss / (2 * beta), 1.0)
        row.require(after <= (row["certificate_rate"] + CLOSE) * loss, f"L⁺ = {after} exceeds the guaranteed rate")
        self._conditions()
        self._network_bounds()
        if "certificate_omega" in row:
            row.at_least("certificate_omega", self.plan.lr * curvature, CLOSE)
        if "certificate_own_rate" in row:
            own = dense.moved(-self.plan.lr * gradient)
            row.at_least("certificate_own_rate", own / loss, CLOSE)

    def _conditions(self) -> None:
        row = self.row
        if "certificate_alpha" in row:
            alpha = row["certificate_alpha"]
            row.equal("certificate_rsc", float(alpha > 0), 0.0)
            self.close("certificate_rsc_margin", alpha)
        if "rsc_alpha" in row:
            size, threshold = row["mean_predictor_grad_norm_sq"], row["rsc_threshold"]
            row.holds("rsc_threshold", threshold >= 0, "no negative number")
            self.close("rsc_margin", size - threshold, size + threshold)
            # In units of ‖ḡ‖², α is the margin.
            factor = 2 * self._scale * self.plan.outputs * row["rsc_kappa"] ** 2
            close = abs(row["rsc_alpha"] - factor * (size - threshold)) <= CLOSE * factor * (size + threshold)
            row.require(close, f"rsc_alpha = {row['rsc_alpha']} is not {factor} times the margin")

    def _network_bounds(self) -> None:
        dense = self.predicting[-1]
        hessians = dense.predictor_hessians(2)
        norms = torch.linalg.eigvalsh((hessians + hessians.mT) / 2).abs()
        self.row.at_least("certificate_hessian_bound", float(norms.max()), CLOSE)
        for name, jacobian in (("gradient", dense.jacobian), ("lipschitz", dense.input_jacobians())):
            largest = float(torch.linalg.matrix_norm(jacobian, 2).max())
            self.row.at_least(f"certificate_{name}_bound", largest, CLOSE * largest)

    def _radii(self) -> None:
        with torch.no_grad():
            start, now = ([b.layer.weight.flatten(1).clone() for b in _refreshed(dense)]
                          for dense in (self.trained[0], self.now))  # fmt: skip
        self.close("rho_1", float((now[-1] - start[-1]).norm(dim=1).max()), 1.0)
        if "rho" in self.row:
            hidden = [float(torch.linalg.matrix_norm(b - a, 2)) for a, b in zip(start[:-1], now[:-1])]
            self.close("rho", max(hidden, default=0.0), 1.0)


def _refreshed(dense) -> list:
    """The blocks after a forward pass: WeightNorm's older form computes its weight there."""
    dense.outputs_of(dense.batches[0])
    return list(dense.module.blocks)
