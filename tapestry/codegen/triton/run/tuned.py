"""What was measured for a kernel on a kind of GPU, kept in the user's cache: one small file per kernel, device and version.

An entry is a hint about speed and nothing else: every choice gives the right result, so a damaged or foreign entry is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry.build.atomic import new_file
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.emit.source import kernel_key
from tapestry.codegen.triton.task.chips import CHIPS, DEFAULT, plain
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.plan.topology.presets import CHIP_OF

if TYPE_CHECKING:
    import torch


def chip_name(device: torch.device, interpreted_as: str = DEFAULT) -> str:
    """The target whose limits and instructions a GPU has: the latest one that is not newer than it."""
    if device.type == "cpu":
        return plain(interpreted_as)
    import torch

    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    older = [n for n, c in CHIPS.items() if isinstance(c.arch, int) and c.arch <= 10 * major + minor]
    if major == 12:  # neither wgmma nor tensor memory, and the shared memory of sm89
        return "sm89"
    return older[-1] if older else "sm80"


def card_of(target: str) -> str:
    """The card that a GPU target stands for, as presets of topologies are called: this machine's, if it is of that kind."""
    import torch

    names = [card for card, chip in CHIP_OF.items() if chip == plain(target)]
    if torch.cuda.is_available() and chip_name(device := torch.device("cuda")) == plain(target):
        said = torch.cuda.get_device_name(device).lower()
        names = [n for n in names if n.partition("-")[0] in said] + names
    return names[0]


log = logging.getLogger("tapestry")
FORMAT = 2
MOST = 1 << 16  # no knob is larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The config of a kernel (``None``: the model's own), and whether the vendor's library was faster still.

    ``wrong`` says in what the kernel computed wrong values with every config that was tried: it is not to be run.
    """

    config: KernelConfig | None = None
    library: bool = False
    wrong: str = ""


Tuned = Callable[[Graph, Kernel], Choice]


@dataclass(frozen=True, slots=True)
class Cache:
    """Measured choices of one kind of GPU under one version of Triton.

    Attributes:
        folder: the user's cache (`flags.cache_folder`).
        device, version: the GPU's name, Triton's version.
        precision: of products of f32.
    """

    folder: Path
    device: str
    version: str
    precision: str = "ieee"

    def __call__(self, graph: Graph, kernel: Kernel) -> Choice:
        """What was measured for a kernel; the defaults where nothing was."""
        return self.read(self.key(graph, kernel)) or Choice()

    def key(self, graph: Graph, kernel: Kernel) -> str:
        """The name of a kernel's entry: what its source depends on, and the precision of products."""
        return f"{kernel_key(graph, kernel)} {self.precision}"

    def path(self, key: str) -> Path:
        """The file of an entry."""
        text = f"{FORMAT}|{key}|{self.device}|{self.version}"
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"

    def read(self, key: str) -> Choice | None:
        """An entry; ``None`` where there is none, or (with a warning) where it is damaged."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            log.warning("tuning cache: %s is ignored: %s", path, e.strerror)
            return None
        try:
            return _choice(json.loads(data), key, self)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            log.warning("tuning cache: %s is ignored: it is damaged (%s)", path, e)
            return None

    def write(self, key: str, choice: Choice, measured: Mapping[str, Any]) -> None:
        """Write an entry, whole or not at all."""
        body: dict[str, Any] = {
            "format": FORMAT, "key": key, "device": self.device, "triton": self.version, "library": choice.library,
            "knobs": asdict(choice.config) if choice.config else None, "measured": dict(measured),
            "wrong": choice.wrong,
        }  # fmt: skip
        with new_file(self.path(key)) as temporary:
            temporary.write_text(json.dumps({**body, "sha256": digest(body)}, indent=1))


def local_cache(folder: Path, device: Any, precision: str = "ieee") -> Cache | None:
    """The cache of a torch device's kind; ``None`` for the CPU: the interpreter's times say nothing."""
    if device.type == "cpu":
        return None
    import torch

    return Cache(folder / "tune", torch.cuda.get_device_name(device), version("triton"), precision)


def recorded(cache: Cache, graph: Graph, kernels: Mapping[str, tuple[Kernel, int]]) -> dict[str, dict[str, Any]]:
    """What was measured for `kernel_sources.distinct_kernels`, as data by their keys: what a build keeps."""
    found = {key: cache(graph, kernel).config for key, (kernel, _) in kernels.items()}
    return {key: asdict(config) for key, config in found.items() if config is not None}


def cache_of_target(folder: Path, target: str, precision: str) -> Cache | None:
    """The cache of this machine's GPU, if anything was ever tuned here and the GPU is of the target's kind."""
    if not (folder / "tune").is_dir():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return local_cache(folder, device, precision) if chip_name(device) == plain(target) else None


def digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _choice(document: Any, key: str, cache: Cache) -> Choice:
    body = dict(document)
    if body.pop("sha256") != digest(body):
        raise ValueError("its hash is another one")
    if [body["format"], body["key"], body["device"], body["triton"]] != [FORMAT, key, cache.device, cache.version]:
        raise ValueError("it is about another kernel, device or version")
    config = None if body["knobs"] is None else config_from(body["knobs"])
    return Choice(config=config, library=body["library"] is True, wrong=str(body["wrong"]))


def config_from(values: Mapping[str, Any]) -> KernelConfig:
    """KernelConfig from data.

    Raises:
        ValueError: a knob that there is not, or a value that it cannot have.
    """
    known = {f.name: f.default for f in fields(KernelConfig)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"no knob '{name}'")
        if type(value) is not type(known[name]) or (type(value) is int and not 1 <= value <= MOST):
            raise ValueError(f"knob {name} cannot be {value!r}")
    return KernelConfig(**dict(values))
