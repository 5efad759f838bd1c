"""The file of a run: what is in it, and how to read it. Loads neither torch nor Lightning."""
