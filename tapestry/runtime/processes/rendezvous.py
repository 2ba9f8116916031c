"""Where the ranks of a run meet: a store that listens on no more than is needed, and one name for this attempt alone.

On one host the store listens on loopback. On several it listens on the address of rank 0, and every rank shows that it
knows a secret (`flags.token`): what ranks say of themselves is sealed with it (HMAC-SHA-256), and the names of all keys
depend on it. The store itself asks nobody for anything, and neither do the connections of gloo and NCCL: the network
between hosts must be one that is trusted.

A launcher that starts ranks again may keep the store of before, with all that was written there, and no count of its own
is the same on all hosts. So ranks agree on their attempt by numbers drawn anew: rank 0 proposes the numbers that it reads,
and a proposal counts once every rank has found its own number in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tapestry import flags
from tapestry.errors import RunError, TapestryError

LOOPBACK = "lo"
LIMIT = 1 << 24  # bytes of what a rank says of itself
SEAL = 32
SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface
BACKLOG = 4096


def seal(secret: bytes, what: Any) -> bytes:
    """JSON, behind a code that shows who knows the secret."""
    body = msgspec.json.encode(what)
    return hmac.digest(secret, body, "sha256") + body


def unseal(secret: bytes, data: bytes, rank: int) -> Any:
    """What was sealed.

    Raises:
        RunError: it was sealed with another secret, or is no such thing.
    """
    body = data[SEAL:]
    if len(data) > LIMIT or not hmac.compare_digest(data[:SEAL], hmac.digest(secret, body, "sha256")):
        raise RunError(
            f"rank {rank} has another token",
            where=f"rank {rank}, before the first step",
            hint="the same TAPESTRY_TOKEN, or TAPESTRY_TOKEN_FILE, on all hosts",
        )
    return msgspec.json.decode(body)


def listening(address: str, port: int, timeout: float) -> Any:
    """A store in this process, on one address and no other.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(place, family=family, backlog=BACKLOG) as s:
        port = s.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            use_libuv=True,
            master_listen_fd=s.detach(),
        )


def connected(address: str, port: int, timeout: float) -> Any:
    """A store in another process."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def join(place: flags.World, timeout: float) -> tuple[Any, bytes]:
    """The store of this attempt alone, and the secret that the ranks share.

    Raises:
        RunError: a rank did not come, or has another token. TapestryError: there is no token where one is needed.
    """
    secret = flags.token()
    try:
        alone = place.locals == place.world or _is_loopback(place.address)
        if not alone and not secret:
            raise TapestryError(
                "a run on several hosts without a token",
                where=f"rank {place.rank}, before the first step",
                why=f"whoever reaches {place.address} could take part",
                hint="TAPESTRY_TOKEN=$(openssl rand -hex 32), or a file as TAPESTRY_TOKEN_FILE, the same on all hosts",
            )
        interface = LOOPBACK if alone else _interface_to(place.address)
        if interface:
            flags.network(interface)
        if place.rank == 0 and not place.served:
            shared = listening(place.address, place.port, timeout)
        else:
            shared = connected(place.address, place.port, timeout)
        return PrefixStore(f"tapestry/{meet(shared, place.rank, place.world, secret, timeout)}", shared), secret
    except (RuntimeError, ValueError, OSError) as e:
        raise RunError(
            f"no rendezvous: {str(e).splitlines()[0]}",
            where=f"rank {place.rank}, before the first step",
            hint="torchrun --nproc-per-node N -m tapestry.runtime BUILD",
        ) from None


def meet(store: Any, rank: int, world: int, secret: bytes, timeout: float) -> str:
    """The name of this attempt, once all ranks that are alive now have found each other.

    Raises:
        RunError: a rank did not come within the timeout, or has another token.
    """
    own, end = secrets.token_hex(16), time.monotonic() + timeout
    lobby: Any = PrefixStore(f"tapestry/meet/{world}", store)
    lobby.set(f"arrived/{rank}", seal(secret, own))
    name, waits = "", set(range(world))
    while time.monotonic() < end:
        if rank == 0:
            numbers = _arrived(lobby, world, secret)
            waits = {r for r in range(world) if r not in numbers}
            proposal = [numbers[r] for r in sorted(numbers)]
            if not waits and _name(secret, proposal) != name:
                name = _name(secret, proposal)
                lobby.set("proposal", seal(secret, proposal))
            if name and not waits:
                waits = {r for r in range(1, world) if not lobby.check([f"found/{name}/{r}"])}
                if not waits:
                    lobby.set(f"go/{name}", seal(secret, name))
                    return name
        else:
            waits = {0}
            if lobby.check(["arrived/0"]):
                unseal(secret, lobby.get("arrived/0"), 0)
            if lobby.check(["proposal"]):
                proposal = unseal(secret, lobby.get("proposal"), 0)
                if proposal[rank : rank + 1] == [own] and _name(secret, proposal) != name:
                    name = _name(secret, proposal)
                    lobby.set(f"found/{name}/{rank}", b"1")
            if name and lobby.check([f"go/{name}"]) and unseal(secret, lobby.get(f"go/{name}"), 0) == name:
                return name
        time.sleep(0.01)
    raise RunError(
        f"rank {', '.join(map(str, sorted(waits)))} did not come within {timeout:g} s",
        where=f"rank {min(waits)}, before the first step",
    )


def _arrived(lobby: Any, world: int, secret: bytes) -> dict[int, str]:
    """The numbers of the ranks that have come, those of an attempt before among them."""
    there = [r for r in range(world) if lobby.check([f"arrived/{r}"])]
    return {r: unseal(secret, lobby.get(f"arrived/{r}"), r) for r in there}


def _name(secret: bytes, proposal: Sequence[str]) -> str:
    return hmac.digest(secret, "/".join(proposal).encode(), hashlib.sha256).hex()[:32]


def _is_loopback(address: str) -> bool:
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found)


def _interface_to(address: str) -> str:
    """The interface of this host from which another host is reached (or that has the address itself); "" if none is found."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))  # sends nothing
            mine = s.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(answer[20:24]) == mine:
                    return name
    except OSError:  # an address of IPv6
        return ""
    return ""
