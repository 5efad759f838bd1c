"""Norms of normalized weight vectors, and what feeds a BatchNorm."""
