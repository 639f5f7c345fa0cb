"""The runtimes, which say where a graph runs: in this process, on Ray, or as one XLA program."""
