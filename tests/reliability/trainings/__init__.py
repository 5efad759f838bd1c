"""Trainings in the idioms of other packages, written for these tests, and what must be measured in each of them."""
