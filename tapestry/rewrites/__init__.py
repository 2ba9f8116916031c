"""Rewrite rules: importing this package fills the table `rule.RULES` with the built-in ones."""

from tapestry.rewrites import block_scan as block_scan
from tapestry.rewrites import cleanup as cleanup
from tapestry.rewrites import compose_views as compose_views
from tapestry.rewrites import drop_results as drop_results
from tapestry.rewrites import fuse_contraction as fuse_contraction
from tapestry.rewrites import fuse_epilogue as fuse_epilogue
from tapestry.rewrites import fuse_maps as fuse_maps
from tapestry.rewrites import fuse_nested as fuse_nested
from tapestry.rewrites import fuse_places as fuse_places
from tapestry.rewrites import fuse_product as fuse_product
from tapestry.rewrites import fuse_results as fuse_results
from tapestry.rewrites import fuse_rows as fuse_rows
from tapestry.rewrites import fuse_sums as fuse_sums
from tapestry.rewrites import inline_map as inline_map
from tapestry.rewrites import micro_batch as micro_batch
from tapestry.rewrites import narrow_factors as narrow_factors
from tapestry.rewrites import overlap as overlap
from tapestry.rewrites import recompute as recompute
from tapestry.rewrites import select_first as select_first
from tapestry.rewrites import slice_dilated as slice_dilated
from tapestry.rewrites import slice_strided as slice_strided
from tapestry.rewrites import split as split
from tapestry.rewrites import split_reduce as split_reduce
from tapestry.rewrites import split_time as split_time
from tapestry.rewrites import stream_softmax as stream_softmax
