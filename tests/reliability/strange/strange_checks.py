"""Every number that a strange model logs, beside its dense reference."""

import math
from typing import Any

import torch
from torch import Tensor

from reliability.strange.strange_ledger import Ledger
from reliability.strange.strange_models import StrangeModel
from reliability.strange.strange_reference import Dense, difference
from support.oracles import loop_norms, loop_norms_except

# Rounding of float64, 1e-16, times what normalizations of a few nearly equal numbers amplify.
CLOSE = 1e-7
EPS = torch.finfo(torch.float64).eps


class Checks:
    """The last row of a run against references at its states: before the training, and after each epoch.

    Args:
        states: the module's `state_dict` at each of these moments.
        steps: the optimizer's steps until then.
    """

    def __init__(self, model: StrangeModel, row: Ledger, states: list[dict[str, Tensor]], steps: list[int]) -> None:
        self.model, self.plan, self.row, self.steps = model, model.plan, row, steps
        self.states = states
        self.trained = [Dense(model, state) for state in states]
        self.predicting = self.held = self.trained
        if "batch" in model.plan.norms:
            self.predicting = [Dense(model, state, independent=True) for state in states]
            self.held = [Dense(model, state, independent=True, held=True) for state in states]
        self.now, self.then = self.trained[-1], self.trained[-2]

    def close(self, name: str, expected: float, scale: float | None = None) -> None:
        self.row.equal(name, expected, CLOSE * (abs(expected) if scale is None else scale))

    # -- loss and gradient ---------------------------------------------------------------------------------------------

    def loss(self) -> None:
        now, then = self.now, self.then
        squares = float(now.gradient.square().sum())
        self.close("loss", now.loss)
        self.close("grad_norm_sq", squares, squares + 1e-12)
        self.close("rsc_ratio", squares / now.loss, squares / now.loss + 1e-12)
        mean = now.jacobian.mean((0, 1))
        self.close("mean_predictor_grad_norm_sq", float(mean.square().sum()), float(now.jacobian.square().sum()))
        if "rsc_kappa" in self.row:
            lengths = float(now.gradient.norm() * mean.norm())
            # A mean of gradients that cancel each other is less exact than they are.
            size = float(now.gradient.norm() * now.jacobian.norm())
            self.close("rsc_kappa", abs(float(now.gradient @ mean)) / lengths, size / lengths)
        self.close("loss_ratio", now.loss / then.loss)
        rate = (now.loss / then.loss) ** (1 / (self.steps[-1] - self.steps[-2]))
        self.close("certificate_rate_measured", rate)

    # -- curvature -----------------------------------------------------------------------------------------------------

    def hessian_reference(self) -> None:
        """The dense Hessian itself against differences of gradients, along a random direction."""
        generator = torch.Generator().manual_seed(self.model.seed)
        direction = torch.randn(len(self.now.gradient), generator=generator, dtype=torch.float64)
        product = self.now.hessian @ direction
        # One of the steps is short enough for the curvature of the curvature, and long enough for the rounding.
        errors = [float((difference(self.now, direction, h) - product).norm()) for h in (1e-4, 1e-5, 1e-6)]
        scale = float(self.now.hessian.norm() * direction.norm() + self.now.gradient.norm())
        self.row.require(min(errors) <= 1e-5 * scale, f"the reference's Hessian is wrong: {errors}, {scale}")

    def hessian(self, prefix: str = "") -> None:
        name = f"{prefix}hessian_lambda_max"
        eigenvalues = torch.linalg.eigvalsh((self.now.hessian + self.now.hessian.t()) / 2)
        found, residual = self.row[name], self.row[f"{name}_residual"]
        rounding = CLOSE * float(eigenvalues.abs().max())
        gap = float((eigenvalues - found).abs().min())
        words = f"an eigenvalue within {residual + rounding}, the largest if converged, of {eigenvalues[-5:].tolist()}"
        # Two eigenvalues within a few percent of each other may be taken for one another (docs/curvature.md).
        top = found >= float(eigenvalues[-1]) - max(residual, 0.05 * abs(float(eigenvalues[-1]))) - rounding
        claim = gap <= residual + rounding and (top or self.row[f"{name}_converged"] == 0)
        self.row.holds(name, claim, words)
        self.row.at_least(f"{name}_residual", gap, rounding)
        self.row.equal(f"{name}_converged", float(residual <= 1e-2 * abs(found)), 0.0)
        self.row.holds(f"{name}_hvps", 1 <= self.row[f"{name}_hvps"] <= 100, "between 1 and max_hvps=100")

    def edges(self, prefix: str = "") -> None:
        lr, kind, value = self.plan.lr, self.plan.optimizer, self.row[f"{prefix}hessian_lambda_max"]
        lines = {"hessian_edge": 2 / lr}
        if kind == "momentum":
            lines["hessian_stability_limit"] = 2 * 1.5 / lr
        for name, line in lines.items():
            self.close(prefix + name, line)
            self.distance(f"{prefix}{name}_distance", line, value)
        if kind == "groups":
            for group, line in {"first": 4 / lr, "SGD1": 2 / lr}.items():
                self.close(f"{prefix}hessian_edge__{group}", line)
                name = f"{prefix}hessian_edge_distance__{group}"
                if name in self.row or not math.isnan(value):  # a Hessian that always fails has no groups
                    self.distance(name, line, value)

    def distance(self, name: str, line: float, value: float) -> None:
        if math.isnan(value):
            self.row.nan(name)
        else:
            self.close(name, line - value, line + abs(value))

    def predictor_hessian(self, prefix: str, samples: int) -> None:
        name = f"{prefix}predictor_hessian_norm"
        hessians = self.held[-1].predictor_hessians(samples)
        norms = torch.linalg.eigvalsh((hessians + hessians.mT) / 2).abs().amax(-1)
        largest, residual = float(norms.max()), self.row[f"{name}_residual"]
        self.row.equal(name, largest, residual + CLOSE * largest + 1e-9)
        self.row.at_least(f"{name}_residual", 0.0)
        self.row.equal(f"{name}_converged", float(residual <= 1e-2 * self.row[name]), 0.0)

    # -- the tangent kernel --------------------------------------------------------------------------------------------

    def kernel(self, unknown: set[str]) -> None:
        samples, which = self.plan.options["ntk_samples"], self.plan.options["ntk_outputs"]
        history = [dense.kernels(samples, which, unknown) for dense in self.held]
        found, first = history[-1], history[0]["kernel"]
        kernel = found["kernel"]
        spectrum = torch.linalg.eigvalsh(kernel)
        low, high = float(spectrum[0]), float(spectrum[-1])
        n = len(self.held[-1].jacobian[:samples])
        self.close("ntk_lambda_min", low, high)
        self.close("ntk_lambda_max", high)
        self.close("ntk_lambda_min_floor", (EPS + len(kernel) * EPS) * high)
        condition = self.row["ntk_condition_number"]
        self.row.holds("ntk_condition_number", abs(1 / condition - low / high) <= CLOSE, f"{high}/{low}, or infinite")
        self.close("ntk_effective_rank", float(kernel.trace() ** 2 / kernel.square().sum()))
        self.close("ntk_samples", n)
        changes = [float((each["kernel"] - first).norm() / first.norm()) for each in history[1:]]
        self.close("ntk_change", changes[-1], 1 + changes[-1])
        self.close("ntk_change_max", max(changes), 1 + max(changes))
        self.shares(found, high, which)
        self.alignment(contract_samples(kernel, n))

    def shares(self, found: dict[str, Tensor], high: float, which: str) -> None:
        total = float(found["kernel"].trace())
        parts = ("direction", "length", "rest")
        share = {part: float(found[part].trace()) / total for part in parts}
        if "ntk_rest_share" in self.row:
            for part in parts:
                self.close(f"ntk_{part}_share", share[part], 1.0)
            lowest = {part: float(torch.linalg.eigvalsh(found[part])[0]) for part in ("direction", "length")}
            for part in ("direction", "length"):
                self.close(f"ntk_{part}_lambda_min", lowest[part], high)
            if "ntk_crossover" in self.row:
                ratio = self.row["ntk_crossover"] ** 2
                claim = abs(ratio * lowest["length"] - lowest["direction"]) <= CLOSE * high * (1 + ratio)
                self.row.holds("ntk_crossover", claim, f"the root of {lowest['direction']}/{lowest['length']}")
        else:
            self.row.require(share["rest"] >= 1 - CLOSE, f"the shares {share} are not logged")
        layers = {key.rpartition(" ")[0] for key in found if " " in key}
        for layer in layers if which != "full" else ():
            label = layer.replace(".", "_") or "module"
            of = {part: float(found[f"{layer} {part}"].trace()) / total if f"{layer} {part}" in found else 0.0
                  for part in parts}  # fmt: skip
            self.close(f"layers/ntk_share__{label}", sum(of.values()), 1.0)
            for part in ("direction", "length"):
                if f"layers/ntk_{part}_share__{label}" in self.row:
                    self.close(f"layers/ntk_{part}_share__{label}", of[part], 1.0)
                else:
                    self.row.require(of[part] <= CLOSE, f"no {part} of {layer}: {of}")

    def alignment(self, kernel: Tensor) -> None:
        if self.plan.second_input:
            self.row.require("ntk_label_alignment" not in self.row, "a second input is taken for labels")
            return
        key: Any = "y" if self.plan.dict_batches else -1
        if self.plan.dict_batches and "ntk_label_alignment" not in self.row:
            return  # a predictor that is given may read either of two tensors of numbers
        y = torch.cat([batch[key] for batch in self.now.batches])[: len(kernel)]
        y = torch.eye(self.plan.outputs, dtype=torch.float64)[y] if y.dim() == 1 else y
        centring = torch.eye(len(y), dtype=torch.float64) - 1 / len(y)
        k, labels = centring @ kernel @ centring, centring @ y @ y.t() @ centring
        if float(k.norm()) > 1e-9 * float(kernel.norm()) and float(labels.norm()) > 0:
            self.close("ntk_label_alignment", float((k * labels).sum() / (k.norm() * labels.norm())), 1e-6 / CLOSE)
        elif "ntk_label_alignment" in self.row:
            self.row.holds("ntk_label_alignment", abs(self.row["ntk_label_alignment"]) <= 1 + CLOSE, "a cosine")

    # -- weights and statistics ----------------------------------------------------------------------------------------

    def weight_norms(self, unknown: set[str]) -> None:
        """Of WeightNorm and of layers that feed a BatchNorm, by the plan; a layer may be unknown with a reason."""
        expected = self._norms()
        logged = {name.removeprefix("layers/weight_norm__") for name in self.row.starting("layers/weight_norm__")}
        for name in logged:
            self.row.require(name in expected, f"{name} counts as normalized")
        for name, (norms, batch_norm) in expected.items():
            if name in logged:
                self.close(f"layers/weight_norm__{name}", min(norms))
            else:
                self.row.require(batch_norm in unknown, f"the weight norms of {name} are not logged")
        if logged:
            self.close("min_weight_norm", min(min(expected[name][0]) for name in logged if name in expected))

    def distance_from_start(self) -> None:
        """‖θ − θ₀‖, where θ₀ is stored in float32."""
        start, now = (torch.cat([state[name].flatten() for name in self.now.names])
                      for state in (self.states[0], self.states[-1]))  # fmt: skip
        norm, found = float(start.norm()), float((now - start).norm())
        rounding = torch.finfo(torch.float32).eps * norm
        self.row.equal("theta_distance", found, rounding + CLOSE * found)
        if norm > 0:  # not if a head of zeros alone is trained
            self.row.equal("theta_distance_relative", found / norm, rounding / norm)

    def _norms(self) -> dict[str, tuple[list[float], str]]:
        """The norms of units by metric, and the BatchNorm that they are normalized by, if it is one."""
        plan, module, found = self.plan, self.now.module, {}
        if plan.embedding_norm:
            found["embedding"] = loop_norms_except(_direction(module.embedding, "weight"), _dim(plan.embedding_dim)), ""
        for index, (block, strange) in enumerate(zip(plan.blocks, module.blocks)):
            path = f"blocks_{index}_layer"
            if block.norm in ("hook", "parametrized"):
                holder = getattr(strange.layer, "cell", None) or getattr(strange.layer, "attention", strange.layer)
                name = {"cell": f"{path}_cell_{block.tensor}", "attention": f"{path}_attention_{block.tensor}"}
                label = next((name[key] for key in name if hasattr(strange.layer, key)), path)
                tensor = block.tensor
                if tensor == "out_proj":
                    holder, tensor = holder.out_proj, "weight"
                found[label] = loop_norms_except(_direction(holder, tensor), _dim(block.dim)), ""
            if block.normalizes_layer:
                found.setdefault(path, (loop_norms(strange.layer), f"blocks.{index}.norm"))
        return found

    def batch_norms(self) -> None:
        found = {}
        for index, strange in enumerate(self.now.module.blocks):
            if strange.block.norm == "batch" and strange.block.batch_norm[1]:
                state = self.states[-1][f"blocks.{index}.norm.running_var"]
                found[f"blocks_{index}_norm"] = float((state + strange.norm.eps).rsqrt().max())
        for name, value in found.items():
            self.close(f"layers/batchnorm_epsilon__{name}", value)
        if found:
            self.close("batchnorm_epsilon", max(found.values()))


def _direction(module: torch.nn.Module, name: str) -> Tensor:
    return (
        module.parametrizations[name].original1 if hasattr(module, "parametrizations") else getattr(module, name + "_v")
    )


def _dim(dim: int | None) -> int | None:
    return None if dim == -1 else dim


def contract_samples(kernel: Tensor, n: int) -> Tensor:
    """The kernel of all outputs, averaged over them; any other is (n, n) already."""
    k = len(kernel) // n
    return kernel.view(n, k, n, k).diagonal(dim1=1, dim2=3).mean(-1) if k > 1 else kernel
