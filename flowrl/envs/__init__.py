"""Environments of Gymnasium and in JAX."""
