"""The world outside of this process: signals, other processes, and texts that are safe to print."""
