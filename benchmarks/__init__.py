"""What the quantities cost, beside other tools, in one run: ``python -m benchmarks``."""
