"""What one epoch measures, and on which samples."""
