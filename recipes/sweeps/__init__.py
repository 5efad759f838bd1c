"""A recipe trained at every point of a grid."""
