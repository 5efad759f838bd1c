"""Measure a model without changing it: state, random numbers, interrupts, memory, processes."""
