"""The constants of WN and RSC for networks of exactly their form, in the ball of the guaranteed step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.norms.units import min_weight_norm
from lightning_normtheory.theorems.papers.rsc import rsc_condition, rsc_constants, rsc_radii
from lightning_normtheory.theorems.papers.wn import weightnorm_constants

__all__ = ["papers_constants"]


def papers_constants(
    measurement: Measurement, initial: list[Tensor], rho2: float, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the constants for networks of the papers' form, at both ends of a step of length ρ₂.

    α, β and the bound of L are those of the trained loss, s times that of the papers.
    γ and ρ₁ grow by at most ρ₂/√m and ρ₂. The directions of a WeightNorm do not shrink in a step of gradient descent.

    Args:
        initial: the weights at fit start; under WeightNorm only the output layer's.
        rho2: ρ₂.
        metrics: ρ₁ as ``rho_1``, and |cos(∇L, ḡ)| as ``rsc_kappa``.
    """
    problem = measurement.theory.problem
    if isinstance(problem.loss, str):
        return {}
    own = problem.has_weight_norm_form, problem.has_rsc_form
    targets = measurement.theory.target_matrix if any(own) else None
    if targets is None or isinstance(problem.chain, str) or not {"rho_1", "rsc_kappa"} <= set(metrics):
        return {}
    chain, (phi,) = problem.chain, problem.activations
    shared = {
        "depth": chain.depth,
        "width": chain.links[0].affine.size,
        "rho1": metrics["rho_1"] + rho2,
        "rho2": rho2,
        "beta_phi": phi.smoothness,
        "phi0": phi.at_zero,
        "targets": targets,
        "v0_norm": float(initial[-1].double().norm(dim=1).max()),
    }
    scale = problem.loss.scale
    if own[0]:
        return _weight_norm(measurement, shared, scale)
    return _rsc(measurement, chain, initial, {**shared, "kappa": metrics["rsc_kappa"]}, scale)


def _weight_norm(measurement: Measurement, shared: dict[str, Any], scale: float) -> dict[str, float]:
    w_min = min_weight_norm(measurement.model)
    found = weightnorm_constants(**shared, w_min=w_min, kappa=1.0, ratio=measurement.rsc.ratio / scale)
    assert found.alpha is not None
    return {
        "wn_alpha": scale * found.alpha,
        "wn_beta": scale * found.beta,
        "wn_hessian_bound": found.hessian,
        "wn_gradient_bound": found.gradient,
        "wn_loss_bound": scale * found.loss,
    }


def _rsc(
    measurement: Measurement, chain: Chain, initial: list[Tensor], shared: dict[str, Any], scale: float
) -> dict[str, float]:
    """Return RSC's own constants, with γ from the spectral norms of the weights."""
    root = shared["width"] ** 0.5
    gamma = rsc_radii([link.affine.weight.cpu() for link in chain.links], initial).gamma
    constants = rsc_constants(**shared, gamma=gamma + shared["rho2"] / root)
    found = rsc_condition(measurement.rsc.mean_predictor_grad_norm_sq, constants, shared["width"])
    return {
        "rsc_gamma": gamma,
        "rsc_alpha": scale * found.alpha,
        "rsc_beta": scale * constants.beta,
        "rsc_hessian_bound": constants.c_H / root,
        "rsc_gradient_bound": constants.varrho,
        "rsc_loss_bound": scale * constants.c_rho,
        "rsc_threshold": found.threshold,
        "rsc_margin": found.margin,
    }
