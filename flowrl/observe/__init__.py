"""WHO WATCHES: progress, files, events."""
