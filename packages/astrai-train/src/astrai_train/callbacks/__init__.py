"""What watches a run: metrics files, progress, trackers."""
