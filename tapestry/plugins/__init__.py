"""Parts that other packages bring along, found by their entry points (docs/howto/plugin.md)."""
