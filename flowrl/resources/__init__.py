"""The state that operators use: runners and learner."""
