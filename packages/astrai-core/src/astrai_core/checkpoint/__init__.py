"""Checkpoint files: Hugging Face directories, GGUF, and where a model's name leads."""
