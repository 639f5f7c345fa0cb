"""What every other package uses: items, events, clocks and compiled functions."""
