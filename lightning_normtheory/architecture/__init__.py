"""The forward pass recorded as a graph of operations."""
