"""Search for good settings: many runs of a graph, each a trial of a study."""
