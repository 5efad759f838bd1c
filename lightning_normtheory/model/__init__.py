"""What a model consists of: layers, parameters, batches."""
