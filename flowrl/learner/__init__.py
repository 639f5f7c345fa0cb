"""Learners: weights, an optimiser and a loss."""
