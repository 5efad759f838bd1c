"""The constants and bounds of each paper, for its own network."""
