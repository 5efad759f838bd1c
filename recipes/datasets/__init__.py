"""The data of the recipes."""

from lightning_normtheory.recipes.datasets.fashion_mnist import FashionMNISTSlice

__all__ = ["FashionMNISTSlice"]
