"""The package's own rules but the book of equations, put into the table of `core.rule.own_rules` by importing this file.

`ORDER` is the order in which rules of one phase are tried: which fusion comes first decides what the others still find.
"""

# ruff: noqa: I001
# pyright: reportUnusedImport=false
from pathlib import Path

from tapestry.rewrites.core.rule import TABLE
from tapestry.rewrites.equations.rule_texts import register_file
from tapestry.rewrites.fusion import contractions  # noqa: F401
from tapestry.rewrites.fusion import fuse_siblings  # noqa: F401
from tapestry.rewrites.fusion import fuse_dequantize  # noqa: F401
from tapestry.rewrites import inline_map  # noqa: F401
from tapestry.rewrites import cleanup  # noqa: F401
from tapestry.rewrites import drop_results  # noqa: F401
from tapestry.rewrites import compose_views  # noqa: F401
from tapestry.rewrites.splitting import slice_strided  # noqa: F401
from tapestry.rewrites.splitting import phases  # noqa: F401
from tapestry.rewrites.splitting import slice_dilated  # noqa: F401
from tapestry.rewrites.splitting import overlap_halo  # noqa: F401
from tapestry.rewrites.splitting import part_routes  # noqa: F401
from tapestry.rewrites.splitting import split  # noqa: F401
from tapestry.rewrites.splitting import split_reduce  # noqa: F401
from tapestry.rewrites.splitting import split_time  # noqa: F401
from tapestry.rewrites.splitting import unfuse  # noqa: F401
from tapestry.rewrites.splitting import block_scan  # noqa: F401
from tapestry.rewrites.splitting import tiled_region  # noqa: F401
from tapestry.rewrites import recompute  # noqa: F401
from tapestry.rewrites.splitting import micro_batch  # noqa: F401
from tapestry.rewrites.fusion import fuse_rows  # noqa: F401
from tapestry.rewrites.fusion import fuse_product  # noqa: F401
from tapestry.rewrites.fusion import fuse_results  # noqa: F401
from tapestry.rewrites.fusion import row_columns  # noqa: F401
from tapestry.rewrites.fusion import fuse_epilogue  # noqa: F401
from tapestry.rewrites.fusion import joined_reductions  # noqa: F401
from tapestry.rewrites.fusion import fuse_semidirect  # noqa: F401
from tapestry.rewrites import lay_out  # noqa: F401
from tapestry.rewrites.fusion import stream_softmax  # noqa: F401
from tapestry.rewrites.fusion import softmax_pattern  # noqa: F401
from tapestry.rewrites.fusion import nest  # noqa: F401

ORDER = (
    "block_scan", "share", "drop_dead", "compose_views", "drop_results", "inline_map", "lay_out", "fuse_contraction",
    "route_products", "fuse_epilogue", "fuse_maps", "fuse_nested", "fuse_places", "fuse_product", "fuse_results", "fuse_rows",
    "fuse_sums", "micro_batch", "narrow_factors", "overlap", "part_routes",
    "recompute", "select_first", "slice_dilated", "slice_strided",
    "split", "split_reduce", "split_time", "stream_softmax", "unfuse",
)  # fmt: skip

for _name in ("fuse_maps", "fuse_places", "select_first"):
    register_file(Path(__file__).parent / f"{_name}.tap")
for _name in ORDER:
    TABLE[_name] = TABLE.pop(_name)
