"""Pure JAX maths: networks, distributions, losses, returns, normalisation."""
