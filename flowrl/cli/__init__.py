"""The `flowrl` command: its arguments, its commands and what it prints."""
