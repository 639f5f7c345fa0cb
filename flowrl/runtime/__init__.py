"""The runtimes, which say where a graph runs: in this process, on Ray, or as one XLA program."""

from flowrl.errors import unknown

NAMES = ("local", "ray", "xla")
"""The names of the runtimes, as `fl.run` and the command line take them."""
DEVICES = ("cpu", "gpu", "cuda", "tpu")
"""Names of devices, which are no runtimes."""


def unknown_runtime(name: str) -> str:
    """Return the message for an unknown name of a runtime."""
    text = unknown("runtime", name, NAMES)
    if name.lower() in DEVICES:
        text += "; they use a GPU by themselves if JAX finds one"
    return text
