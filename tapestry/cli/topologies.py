"""``tapestry topology``: the figures that a topology has, and where they come from."""

from __future__ import annotations

import argparse

from tapestry.cli.outcome import Outcome


def topology(args: argparse.Namespace) -> Outcome:
    """``tapestry topology show``: each figure of a preset or a file with where it comes from."""
    from tapestry.plan.topology import default_mesh, parse_mesh, to_data
    from tapestry.plan.topology import topology as made
    from tapestry.plan.topology.presets import SOURCES

    name: str = args.topology
    found = made(default_mesh(name) or parse_mesh(args.mesh or "8"), name)
    data = to_data(found)
    origins = (SOURCES[name].origins or {"all": "assumed"}) if name in SOURCES else {"all": "the file"}
    sizes = (1 << 16, 1 << 20, 1 << 26)  # bytes

    def show() -> None:
        print("\n".join(f"{name}: {value}" for name, value in data["device"].items()))
        for axis, link in zip(data["mesh"], data["links"], strict=True):
            print(f"link of {axis[0]} ({axis[1]} devices): {link['alpha'] * 1e6:.3g} µs, {1e-9 / link['beta']:.4g} GB/s")
        for c in found.calls:
            times = ", ".join(f"{n >> 10} KiB {c.seconds(n) * 1e6:.4g} µs" for n in sizes)
            print(f"{c.call} of {c.group}: {times}")
        print("\nwhere they come from", *(f"  {what}: {origin}" for what, origin in origins.items()), sep="\n")

    return Outcome({**data, "origins": origins}, show, insist=True)
