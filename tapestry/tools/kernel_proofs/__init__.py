"""Kernels proved from their source text: what they write, what they read, and that the value is their operation's."""
