"""Networks in which layers feed a BatchNorm."""
