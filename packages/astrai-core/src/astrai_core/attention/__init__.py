"""Attention over the paged pool: step metadata, the backend seam and its implementations."""
