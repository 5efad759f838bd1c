"""Cases of the theory rooms: bounds, Hessians, kernels, the papers' networks, theorems."""
