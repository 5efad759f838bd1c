"""Which theorem applies, and the bounds that it gives."""
