"""Rewrite rules: importing this package fills the table `rule.RULES` with the built-in ones.

The order below is the order in which rules of one phase are tried: which fusion comes first decides what the others still find.
"""

# ruff: noqa: I001, E402
from pathlib import Path

from tapestry.rewrites.core.rule import RULES as RULES
from tapestry.rewrites.equations.rule_texts import load_rules as load_rules
from tapestry.rewrites.equations.rule_texts import register_file
from tapestry.rewrites import algebra as algebra

MAPS = Path(__file__).parent / "maps"

from tapestry.rewrites.partition import block_scan as block_scan
from tapestry.rewrites.maps import cleanup as cleanup
from tapestry.rewrites.maps import compose_views as compose_views
from tapestry.rewrites.maps import drop_results as drop_results
from tapestry.rewrites.maps import inline_map as inline_map
from tapestry.rewrites.contractions import fuse_contraction as fuse_contraction
from tapestry.rewrites.contractions import route_products as route_products
from tapestry.rewrites.reductions import fuse_epilogue as fuse_epilogue

register_file(MAPS / "fuse_maps.tap")
from tapestry.rewrites.reductions import fuse_semidirect as fuse_semidirect

register_file(MAPS / "fuse_places.tap")
from tapestry.rewrites.reductions import fuse_product as fuse_product
from tapestry.rewrites.reductions import fuse_results as fuse_results
from tapestry.rewrites.reductions import fuse_rows as fuse_rows
from tapestry.rewrites.contractions import fuse_siblings as fuse_siblings
from tapestry.rewrites.partition import micro_batch as micro_batch
from tapestry.rewrites.contractions import fuse_dequantize as fuse_dequantize
from tapestry.rewrites.partition import overlap_halo as overlap_halo
from tapestry.rewrites.partition import recompute as recompute

register_file(MAPS / "select_first.tap")
from tapestry.rewrites.partition import slice_dilated as slice_dilated
from tapestry.rewrites.partition import slice_strided as slice_strided
from tapestry.rewrites.partition import split as split
from tapestry.rewrites.partition import split_reduce as split_reduce
from tapestry.rewrites.partition import split_time as split_time
from tapestry.rewrites.reductions import stream_softmax as stream_softmax
from tapestry.rewrites.partition import unfuse as unfuse
