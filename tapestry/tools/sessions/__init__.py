"""Sessions: builds that stay loaded."""
