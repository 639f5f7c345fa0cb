"""The debugger: it stops a run at chosen places, shows and changes it, and goes back in it."""
