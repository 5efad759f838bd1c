"""Metrics of `BatchNormTheory`."""

from functools import partial

from lightning_normtheory.record.metric_info import MetricInfo

_metric = partial(MetricInfo, callback="BatchNormTheory")
_keep_min = partial(_metric, extreme="min")
_keep_max = partial(_metric, extreme="max")
_flag = partial(_keep_min, kind="flag")

METRICS = (
    _keep_max(
        "batchnorm_epsilon",
        "ε_N",
        "maximum of 1/N over all features, from the running statistics",
        "epsilon",
        row="ε_N of BatchNorm",
    ),
    _keep_max("layers/batchnorm_epsilon__*", "ε_N", "maximum of 1/N over the layer's features", "layer_epsilon"),
    _metric("batchnorm_epsilon_start", "ε_N at the start", "maximum of 1/N at fit start, on the probe", "epsilon"),
    _metric("batchnorm_input_norm", "max ‖x̄‖", "largest norm of a centered input; BN assumes ≤ 1", "bn_assumptions"),
    _keep_max("batchnorm_shift", "shift", "largest bias after the normalization; BN assumes none", "bn_assumptions"),
    _keep_max(
        "batchnorm_displacement_u", "‖U−U₀‖", "distance of output weights and scales from the start", "distance_u"
    ),
    _keep_max(
        "batchnorm_displacement_v",
        "‖V−V₀‖",
        "distance of the hidden weights from the start",
        "distance_v",
        row="‖V−V₀‖",
    ),
    _keep_max(
        "batchnorm_margin",
        "γ(W)",
        "smallest y·f(x)/(‖a‖‖c‖) on the probe, with its own statistics",
        "bn_margin",
        row="normalized margin",
    ),
    _metric(
        "batchnorm_rademacher",
        "Lemma F.1, corrected",
        "complexity of BN's class around V₀, with batch statistics",
        "rademacher",
        role="upper",
        extreme="min",
    ),
    _keep_max("batchnorm_delta_v", "Δ_V", "distance of the hidden weights from the start, relative to N", "delta_v"),
    _metric(
        "batchnorm_delta_v_allowed", "γ/32", "largest Δ_V of reference weights that γ allows", "delta_v", role="limit"
    ),
    _metric("batchnorm_gamma_a", "γ_a", "margin through the output weights at fit start", "margins", column=True),
    _metric("batchnorm_gamma_c", "γ_c", "margin through BatchNorm's scales at fit start", "margins", column=True),
    _metric("batchnorm_gamma_gap", "error of γ", "error bound of γ_a + γ_c", "margins", role="floor"),
    _metric("batchnorm_radius_u", "radius of U", "bound on ‖U−U₀‖ of BN, Theorem 2.1", "distance_u", role="upper"),
    _metric(
        "batchnorm_gd_radius_u",
        "8 (unproved)",
        "bound on ‖U−U₀‖ of BN, Theorem 2.2, as printed, unproved",
        "distance_u",
        role="upper",
    ),
    _metric("batchnorm_radius_v", "radius of V", "bound on ‖V−V₀‖ of BN, Theorem 2.1", "distance_v", role="upper"),
    _flag(
        "batchnorm_within_radii", "within the radii", "1 while both distances are within their radii", "bn_conditions"
    ),
    _metric("batchnorm_width_needed", "width needed", "smallest width that the theorem admits", "width", role="lower"),
    _flag("batchnorm_width_ok", "wide enough", "1 if the network is that wide", "bn_conditions"),
    _keep_min(
        "batchnorm_error_bound",
        "error bound",
        "error bound of BN, Theorem 2.1, eq. (2), after the steps so far",
        "bn_error",
        role="upper",
    ),
    _keep_min(
        "batchnorm_gd_error_bound",
        "GD (unproved)",
        "error bound of BN, Theorem 2.2, eq. (6), as printed, unproved",
        "bn_error",
        role="upper",
    ),
    _flag("batchnorm_error_vacuous", "error bound vacuous", "1 if that bound is 1 or more", "vacuous"),
)
