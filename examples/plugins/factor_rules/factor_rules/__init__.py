"""Where this package's file of equations is."""

from pathlib import Path

FILE = Path(__file__).parent / "factors.tap"
