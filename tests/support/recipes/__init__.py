"""Recipes, their command line, data and figures."""
