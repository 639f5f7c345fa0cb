"""Experience on disk: datasets in Minari's format, how they are written, and how they are read."""
