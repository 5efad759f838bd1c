"""Hessian products, eigenvalues, and the edge of stability."""
