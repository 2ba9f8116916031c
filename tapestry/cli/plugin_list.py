"""What ``tapestry --version -v`` says of plug-ins."""

from __future__ import annotations

from collections.abc import Iterator


def lines() -> Iterator[str]:
    """Every plug-in that installed packages bring, imported to see whether it loads: one a line."""
    from tapestry import flags
    from tapestry.ir.monoid import BUILT_IN
    from tapestry.plan.topology import PRESETS
    from tapestry.plugins import entry_points as plugins

    if not flags.plugins():
        yield f"plug-ins: none; {plugins.OFF}"
        return
    rows = plugins.listed({"targets": ("torch-cpu",), "monoids": BUILT_IN, "topologies": ("auto", *PRESETS)})
    yield f"plug-ins: {len(rows)}" if rows else "plug-ins: none"
    for r in rows:
        yield f"  tapestry.{r['kind']} '{r['name']}': {r['package']} {r['version']} ({r['object']}): {r['state']}"
