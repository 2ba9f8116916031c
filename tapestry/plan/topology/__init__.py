"""Devices and what joins them: levels, shapes of links, arbitrary maps of links, presets and files."""

from tapestry.plan.topology.fabric import Device, Fabric, Link, Topology, Wire, fabrics, weakest
from tapestry.plan.topology.meshes import MAX_DEVICES, parse_mesh
from tapestry.plan.topology.presets import PRESETS, GiB
from tapestry.plan.topology.shares import shared
from tapestry.plan.topology.topology_data import device_data, from_data, to_data
from tapestry.plan.topology.topology_files import default_mesh, linked, parse_bytes, topology

__all__ = [
    "MAX_DEVICES",
    "PRESETS",
    "Device",
    "Fabric",
    "GiB",
    "Link",
    "Topology",
    "Wire",
    "default_mesh",
    "device_data",
    "fabrics",
    "from_data",
    "linked",
    "parse_bytes",
    "parse_mesh",
    "shared",
    "to_data",
    "topology",
    "weakest",
]
