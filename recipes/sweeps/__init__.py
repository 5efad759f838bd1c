"""Train a recipe at every point of a grid."""
