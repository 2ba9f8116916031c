"""Rewrite rules: importing this package fills the table `rule.RULES` with the built-in ones.

`ORDER` is the order in which rules of one phase are tried: which fusion comes first decides what the others still find.
"""

# ruff: noqa: I001
from pathlib import Path

from tapestry.rewrites.core.rule import RULES as RULES
from tapestry.rewrites.equations.rule_texts import load_rules as load_rules
from tapestry.rewrites.equations.rule_texts import register_file
from tapestry.rewrites import algebra as algebra
from tapestry.rewrites import contractions as contractions
from tapestry.rewrites import inline_map as inline_map
from tapestry.rewrites import slice_strided as slice_strided
from tapestry.rewrites import split as split
from tapestry.rewrites import tiled_region as tiled_region
from tapestry.rewrites import fuse_rows as fuse_rows
from tapestry.rewrites import joined_reductions as joined_reductions
from tapestry.rewrites import lay_out as lay_out
from tapestry.rewrites import stream_softmax as stream_softmax

ORDER = (
    "block_scan", "share", "drop_dead", "compose_views", "drop_results", "inline_map", "lay_out", "fuse_contraction",
    "route_products", "fuse_epilogue", "fuse_maps", "fuse_nested", "fuse_places", "fuse_product", "fuse_results", "fuse_rows",
    "fuse_sums", "micro_batch", "narrow_factors", "overlap", "recompute", "select_first", "slice_dilated", "slice_strided",
    "split", "split_reduce", "split_time", "stream_softmax", "unfuse",
)  # fmt: skip

for _name in ("fuse_maps", "fuse_places", "select_first"):
    register_file(Path(__file__).parent / f"{_name}.tap")
for _name in ORDER:  # behind the equations, which are tried first
    RULES[_name] = RULES.pop(_name)
