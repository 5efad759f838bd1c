"""Linear algebra.

* ``precision``: where float64 exists
* ``arithmetic``: how a device rounds products of matrices
* ``inner_products``: inner products of long vectors, summed in float64
* ``noise``: random vectors as large as a model, from few random numbers
* ``eigensolvers``: power iteration and Lanczos, for maps that are known by their products
* ``sampling``: means and squared norms of a whole set, estimated from some of its samples
* ``spectrum``: extreme eigenvalues and norms of dense matrices
"""
