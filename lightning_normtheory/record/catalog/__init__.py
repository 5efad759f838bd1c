"""Declarations of the metrics, a file for each callback."""
