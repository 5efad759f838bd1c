"""Linear algebra: eigensolvers, spectra, inner products."""
