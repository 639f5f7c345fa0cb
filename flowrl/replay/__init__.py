"""Replay buffers, in host memory and on a device."""
