"""Many seeds of one graph, in processes of their own."""
