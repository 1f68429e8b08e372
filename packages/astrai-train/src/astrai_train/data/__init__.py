"""Training data: pre-tokenised stores, packing into rows, sampling, and batches."""
