"""The forward pass recorded as a graph of operations."""

from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.recorder import record_forward

__all__ = ["Chain", "chain_of", "record_forward"]
