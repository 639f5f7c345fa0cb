"""Observers of runs: progress, files, explanations and traces."""
