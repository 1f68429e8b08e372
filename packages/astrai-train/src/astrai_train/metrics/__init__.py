"""Figures about a run that are more than its loss."""
