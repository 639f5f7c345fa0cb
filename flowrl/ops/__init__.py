"""The vocabulary: one class, one job."""
