"""The constants and bounds of each paper, for networks of exactly its form.

* ``wn``: constants of WN's optimization theorems; ``wn_generalization``: WN's Rademacher and generalization bounds.
* ``rsc``: constants, radii and condition of RSC.
* ``lin``: how nearly linear a network is in its parameters; ``lin_form``: the test for LIN's networks.
* ``dgm``: DGM's infinite-width kernels, and the test for its network; ``dgm_training``: its radii and sign changes;
  ``dgm_rates``: its steps, widths and rates, and the best scale α (Proposition 2).
* ``bn_form``: the test for BN's network; ``bn_factors``: normalization factors; ``bn_margin``: the margin γ;
  ``bn_bounds``: Lemma F.1 (corrected), Theorems 2.1 and 2.2; ``dyadic``: BN's dyadic data set.
"""
