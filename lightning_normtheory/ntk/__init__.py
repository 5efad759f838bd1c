"""The empirical tangent kernel: network, plan, gradients, assembly, result."""
