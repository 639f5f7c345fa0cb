"""The live page: a running algorithm as a graph in the browser."""
