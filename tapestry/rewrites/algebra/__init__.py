"""Laws of sums, products and reductions as rules: never tried by themselves, but there to be asked for by a move."""

from pathlib import Path

from tapestry.rewrites.equations.rule_texts import register_file

for _path in sorted(Path(__file__).parent.glob("*.tap")):
    register_file(_path)
