"""Cases of the theory rooms: bounds, Hessians, kernels, norms, the papers' networks, theorems."""
