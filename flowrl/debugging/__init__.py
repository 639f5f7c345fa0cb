"""The debugger: a run that stops where it is told to, is looked at, changed, and gone back in."""
