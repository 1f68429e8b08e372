"""The decoder: one model class for training and inference."""
