"""The only place that reads or sets the environment."""

from __future__ import annotations

import os
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tapestry.errors import TapestryError

STARTED = time.perf_counter()  # about when the process did: the package imports this first
torch_spins: bool = False  # whether torch was imported before it could be told to let its idle threads sleep (`before_torch`)


def debug_level() -> int:
    """``TAPESTRY_DEBUG``: 1 every pass with its seconds and sizes, 2 the laws between passes, 3 the IR after each pass."""
    value = os.environ.get("TAPESTRY_DEBUG", "0")
    return int(value) if value.isdigit() else 0


def native_kernels() -> bool:
    """``TAPESTRY_NATIVE=0``: no kernels compiled from C; the CPU target uses torch's operators only."""
    return os.environ.get("TAPESTRY_NATIVE", "1") != "0"


def plugins() -> bool:
    """``TAPESTRY_PLUGINS=0``: nothing that other packages bring is looked for (`plugins.entry_points`)."""
    return os.environ.get("TAPESTRY_PLUGINS", "1") != "0"


def strict() -> bool:
    """``TAPESTRY_STRICT=1``: a rewrite whose proof fails ends the compilation; otherwise it is left undone."""
    return os.environ.get("TAPESTRY_STRICT", "0") != "0"


def c_compiler() -> str:
    """``CC``: the command of the C compiler, with its first arguments."""
    return os.environ.get("CC") or "cc"


def check_messages() -> bool:
    """``TAPESTRY_CHECK_MESSAGES=1``: what ranks send each other goes with headers, which are checked."""
    return os.environ.get("TAPESTRY_CHECK_MESSAGES", "0") != "0"


def before_numpy() -> None:
    """What numpy's BLAS reads when it is imported, unless the user said otherwise.

    Its idle threads sleep: by default they spin for a tenth of a second after every product, on cores that others want.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


def before_torch() -> None:
    """What torch reads when it is imported, unless the user said otherwise.

    Idle OpenMP threads sleep: spinning ones on busy cores make small operators up to sixteen times slower. torch's network code
    does not warn of peers that are gone: we say who and why, once.
    """
    global torch_spins
    torch_spins |= "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


RESULTS = (
    "TAPESTRY_NATIVE", "TAPESTRY_CHECK_MESSAGES", "TRITON_INTERPRET", "ATEN_CPU_CAPABILITY", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip


def of_results() -> dict[str, str]:
    """Variables that change what is computed, by rounding at least, as they are set; ``""`` where they are not."""
    return {name: os.environ.get(name, "") for name in RESULTS}


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "OpenMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}  # in this order: who is started by another one's processes comes first
ADDRESS = {
    "SLURM": 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500',
    "OpenMPI": "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500",
}


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that a launcher has started.

    Attributes:
        by: the launcher, or ``""`` for a process that is alone.
        local, locals: its number on its host, and how many are there (0: unknown).
        address, port: where the rendezvous store is.
        served: the launcher has opened that store; else rank 0 does.
    """

    by: str = ""
    rank: int = 0
    world: int = 1
    local: int = 0
    locals: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    served: bool = False


def world() -> World:
    """What torchrun, OpenMPI, PMI or SLURM say of this process; a world of one if none of them says anything.

    Raises:
        TapestryError: they say something that is no place in a world, or not where the ranks meet.
    """
    by = next((b for b, names in LAUNCHERS.items() if any(n in os.environ for n in names[:2])), "")
    if by == "SLURM" and "SLURM_PROCID" not in os.environ and _number_of_variable("SLURM_NTASKS") == 1:
        by = ""  # a shell of salloc
    if not by:
        if "PMIX_RANK" in os.environ:
            raise _flag_error(
                "PMIX_RANK is set, but nothing says of how many", "MPI", "mpirun of OpenMPI, or RANK and WORLD_SIZE"
            )
        return World()
    names = LAUNCHERS[by]
    absent = next((n for n in names[:2] if n not in os.environ), None)
    if absent is not None:
        there = next(n for n in names[:2] if n in os.environ)
        hint = "srun starts as many" if by == "SLURM" else f"start all ranks by {by}, or unset {there}"
        raise _flag_error(f"{there} is {os.environ[there]}, but {absent} is not set", by, hint)
    rank, count, local = (_number_of_variable(n) for n in names[:3])
    if not 0 <= rank < count:
        raise _flag_error(f"{names[0]} is {rank}, of {count}", by, f"{names[0]} counts from 0 to {names[1]} - 1")
    if count == 1:
        return World(by)
    for n in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(n):
            hint = ADDRESS.get(by, "MASTER_ADDR is the host of rank 0, MASTER_PORT a free port there")
            raise _flag_error(f"{names[1]} is {count}, and {n} is not set: the ranks cannot meet", by, hint)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    port, each = _number_of_variable("MASTER_PORT"), 0 if by == "SLURM" else _number_of_variable(names[3])
    return World(by, rank, count, local, each, os.environ["MASTER_ADDR"], port, served)


def _flag_error(what: str, by: str, hint: str) -> TapestryError:
    return TapestryError(what, where=f"the environment ({by})", hint=hint)


def _number_of_variable(name: str) -> int:
    """A variable's number, 0 where it is not set."""
    value = os.environ.get(name, "0")
    if not value.isdecimal():
        raise TapestryError(f"{name} is '{value}', not a number", where="the environment")
    return int(value)


def token() -> bytes:
    """``TAPESTRY_TOKEN``, or what the file ``TAPESTRY_TOKEN_FILE`` holds: a secret that ranks on several hosts share.

    Raises:
        TapestryError: the file does not read, or the secret is shorter than 16 bytes.
    """
    value, path = os.environ.get("TAPESTRY_TOKEN", "").encode(), os.environ.get("TAPESTRY_TOKEN_FILE", "")
    if not value and path:
        try:
            value = Path(path).read_bytes().strip()
        except OSError as e:
            raise TapestryError(f"no token: {e.strerror}", where=path) from None
    if value and len(value) < 16:
        raise TapestryError(f"a token of {len(value)} bytes", where="TAPESTRY_TOKEN", hint="openssl rand -hex 32")
    return value


def network(interface: str) -> None:
    """The interface on which gloo and NCCL listen, unless the user said which."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)


def cache_folder() -> Path:
    """Where what was measured on this machine is kept: ``TAPESTRY_CACHE``, else ``tapestry`` in the user's cache folder."""
    own = os.environ.get("TAPESTRY_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapestry"


def topology() -> str:
    """``TAPESTRY_TOPOLOGY``: the preset or file that ``--topology auto`` stands for, so that nothing is measured."""
    return os.environ.get("TAPESTRY_TOPOLOGY", "")


def alone() -> dict[str, str]:
    """The environment of a process that is none of a launcher's."""
    names = {n for of in LAUNCHERS.values() for n in of} | {"PMIX_RANK"}
    return {k: v for k, v in os.environ.items() if k not in names}


def interpreted() -> dict[str, str]:
    """The environment of a process in which Triton interprets kernels on the CPU (it decides when it is imported)."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


def interprets() -> bool:
    """Whether Triton interprets kernels in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def version() -> str:
    """The package's, of a checkout that nobody installed as well."""
    try:
        return metadata.version("tapestry")
    except metadata.PackageNotFoundError:
        file = Path(__file__).parents[1] / "pyproject.toml"
        return tomllib.loads(file.read_text())["project"]["version"] if file.is_file() else "not installed"
