"""The panels about WeightNorm in plain words, on each side of every threshold."""

import math

import pytest

from support.view.reading_cases import read

FAR, NEAR = {"dgm_reach_v": [9.0], "dgm_radius_v": [0.5]}, {"dgm_reach_v": [9.0], "dgm_radius_v": [2.0]}
BEST = {"dgm_rate_unnormalized": [0.95]}


@pytest.mark.parametrize(
    ("key", "series", "finding", "mood"),
    [
        ("directions_distance", {"weightnorm_displacement_v": [1.0]}, "The directions have moved.", "note"),
        (
            "directions_distance",
            {"weightnorm_displacement_v": [2.0], **NEAR},
            "The directions are within DGM's radius.",
            "good",
        ),
        (
            "directions_distance",
            {"weightnorm_displacement_v": [9.0], **FAR},
            "The directions are beyond DGM's radius.",
            "note",
        ),
        (
            "directions_distance",
            {"weightnorm_displacement_v": [9.1], **FAR},
            "The directions are farther than at the theorem's rate.",
            "bad",
        ),
        ("lengths_distance", {"weightnorm_displacement_g": [1.0]}, "The lengths have moved.", "note"),
        (
            "lengths_distance",
            {"weightnorm_displacement_g": [1.0], "dgm_reach_g": [0.9], "dgm_radius_g": [0.1]},
            "The lengths are farther than at the theorem's rate.",
            "bad",
        ),
        (
            "sign_changes",
            {"dgm_sign_changes": [0.049], "dgm_sign_changes_bound": [0.2]},
            "Few units have changed their side of the ReLU.",
            "good",
        ),
        (
            "sign_changes",
            {"dgm_sign_changes": [0.05], "dgm_sign_changes_bound": [0.2]},
            "Many units have changed their side of the ReLU.",
            "note",
        ),
        (
            "dgm_rate",
            {"dgm_rate_measured": [0.9], "dgm_rate": [0.9]},
            "It contracts at least as fast as DGM's theorem says.",
            "good",
        ),
        (
            "dgm_rate",
            {"dgm_rate_measured": [0.91], "dgm_rate": [0.9]},
            "It contracts more slowly than DGM's theorem says.",
            "bad",
        ),
        ("dgm_step", {"dgm_step": [1 / 3]}, "The step is as short as DGM asks.", "good"),
        ("dgm_step", {"dgm_step": [0.34]}, "The step is longer than DGM asks.", "note"),
        ("dgm_step", {"dgm_step": [2.0]}, "The step is too long.", "bad"),
        ("dgm_best_rate", {"dgm_rate_best": [0.94], **BEST}, "WeightNorm can be faster on these samples.", "note"),
        ("dgm_best_rate", {"dgm_rate_best": [0.95], **BEST}, "WeightNorm is not faster on these samples.", "note"),
    ],
)
def test_what_each_panel_says(key, series, finding, mood):
    reading = read(key, **series)
    assert (reading.finding, reading.mood) == (finding, mood)


@pytest.mark.parametrize(("alpha", "words"), [(0.0, "α → 0"), (math.inf, "α → ∞"), (0.25, "α = 0.25")])
def test_where_the_best_rate_is(alpha, words):
    reading = read("dgm_best_rate", dgm_rate_best=[0.94], dgm_alpha_best=[alpha], **BEST)
    assert reading.text.endswith(f"the best is {words}.")
