"""The runtimes, which say where a graph runs: in this process, on Ray, or as one XLA program."""

NAMES = ("local", "ray", "xla")
"""The names of the runtimes, as `fl.run` and the command line take them."""
