"""The libraries that other people wrote and that ours must agree with."""

import warnings

with warnings.catch_warnings():  # both use names that JAX has deprecated, while they are imported
    warnings.simplefilter("ignore")
    import distrax
    import rlax

__all__ = ["distrax", "rlax"]
