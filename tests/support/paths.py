"""Where things are in a checkout, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS, EXAMPLES, BENCH = ROOT / "tests", ROOT / "examples", ROOT / "bench"
SHARED = ROOT.parent / "shared"  # exported models and contest data, an optional folder beside the checkout
