"""Runners: they step environments with a policy and return rollouts."""
