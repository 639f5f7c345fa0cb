"""WHERE a graph runs: in this process, or on Ray."""
