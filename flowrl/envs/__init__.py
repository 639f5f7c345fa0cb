"""Environments of Gymnasium, and environments written in JAX."""
