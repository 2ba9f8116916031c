"""The values of a kernel's knobs that a model of the chip chooses without measuring.

`default_config` is the best of `candidates` by the model; a tuner measures `candidates` and passes the winner to
`source.generate`. All candidates give the same result up to the order of rounding; ``split_k`` and tile sizes change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from tapestry.codegen.blocks.forms import (
    Contraction,
    Folded,
    KernelForm,
    Stream,
    centred,
    exact_dtype,
    plain_results,
    power_of_two,
    row_dims,
    siblings,
    split_selection,
    transposing_dims,
)
from tapestry.codegen.blocks.lowered import Access, Task, points
from tapestry.codegen.blocks.operands import HALVES, compute, operand_size
from tapestry.codegen.blocks.ragged_parts import most_parts, splits
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.codegen.triton.task.chips import Chip, chip_of, on_chip
from tapestry.codegen.triton.task.descriptors import aligned, operand_boxes, stream_boxes
from tapestry.codegen.triton.task.row_order import sorted_rows
from tapestry.ir.expr import Call, Index, arg_positions, instructions, walk
from tapestry.ir.graph import Dim
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.exponential import INT8
from tapestry.ir.recognition.selection_sum import Selection
from tapestry.ir.types import FLOAT8, itemsize

# Tiles of the kernels that memory decides: maps, rows, reductions, gathers, scans.


LONGEST = 16384  # elements of a row that are kept in registers, by up to 16 warps
_AHEAD, _RING = 3, 48 << 10  # tiles of a reduction that are on their way while one is merged; bytes of shared memory for them
_LATENCY = 7e-7  # seconds from a load to its value when memory is busy: so many bytes must be on their way


def memory_config(form: KernelForm, chip: Chip) -> KernelConfig:
    """The model's choice for a kernel that is no product."""
    task = form.task
    if form.kind == "map":
        return _map(task)
    if form.kind == "rows":
        return _rows(task)
    if form.kind == "scan":
        return _scan(task)
    if form.kind == "order":
        return KernelConfig(block=min(4096, power_of_two(points(task.dims))), num_warps=8)
    if form.kind == "gather" and form.picked is not None:
        return _gather_tile(form.task, form.picked)
    return _reduce(form, chip)


def neighbours(first: KernelConfig, form: KernelForm, chip: Chip) -> Iterator[KernelConfig]:
    """The model's choice, then its neighbours in every field that the kind has."""
    yield first
    for warps in (first.num_warps * 2, first.num_warps // 2):
        if 1 <= warps <= (16 if chip.warp == 64 else 32):
            yield replace(first, num_warps=warps)
    if form.kind == "map":
        for block in (first.block * 2, first.block // 2, first.block * 4):
            if 64 <= block <= 8192:
                yield replace(first, rows=1, block=block, num_warps=max(1, min(16, first.num_warps * block // first.block)))
        return
    for rows in (first.rows * 2, first.rows // 2):
        if 1 <= rows <= 64:
            yield replace(first, rows=rows)
    if form.kind == "reduce":
        for cols in (first.cols * 2, first.cols // 2):
            if 1 <= cols <= 8192 and first.cols > 1:
                yield replace(first, cols=cols)


def _map(task: Task) -> KernelConfig:
    """Tiles of a map: 4 KiB of output (16 bytes per thread and access), fewer for a small block.

    Where reads run along another dimension than writes: 64 x 64.
    """
    width = max(itemsize(a.dtype) for a in task.outs)
    flat = min(max(1024, 4096 // width), power_of_two(points(task.dims)))
    if (found := transposing_dims(task)) is None:
        return KernelConfig(block=flat)
    tall, wide = (min(64, power_of_two(task.dims[k].size)) for k in found)
    return KernelConfig(block=flat, rows=tall, cols=wide, num_warps=4 if tall * wide <= 2048 else 8)


def _rows(task: Task) -> KernelConfig:
    """A row to a program, or several short ones; warps by the length of what is kept in registers."""
    found = row_dims(task)
    assert found is not None
    longest = LONGEST if len(task.body) == 1 or centred(task) else LONGEST // 2
    width = min(longest, max(power_of_two(points(task.reduce)), power_of_two(points(found[1]))))
    height = max(1, min(power_of_two(points(found[0])), 1024 // width))
    held = width * height
    warps = 1 if held <= 512 else 2 if held <= 1024 else 4 if held <= 4096 else 8 if held <= 8192 else 16
    return KernelConfig(rows=height, cols=width, num_warps=warps)


def _reduce(form: KernelForm, chip: Chip) -> KernelConfig:
    """Tiles of a reduction: about 2048 elements (1024 with several fields, 4 KB with a centre), along what lies contiguous."""
    task = form.task
    rows, cols = points(task.dims), points(task.reduce)
    along = {d.name for d in task.reduce}
    size = max((itemsize(a.dtype) for p, a in task.reads.items() if task.read_dims(p) & along), default=4)
    # states of lanes are in registers; of states with a centre rows have one, and lanes only what they read
    lanes = 4096 // size if centred(task) else 2048 if len(task.body) == 1 else 1024
    if task.monoid and not MONOIDS[task.monoid].commutative:
        return KernelConfig(rows=min(128, power_of_two(rows)), cols=1, num_stages=1)  # lanes would merge out of order
    along_rows = _moved_along(task, task.dims) > _moved_along(task, task.reduce)
    width = min(power_of_two(cols), 32 if along_rows else lanes)
    height = min(power_of_two(rows), max(1, lanes // max(1, width)))
    least, wanted = (64 // size, 2 * chip.units) if along_rows else (8, chip.units)  # whole sectors of memory
    while height > least and -(-rows // height) < wanted:
        height //= 2
    width = min(power_of_two(cols), max(width, lanes // height if not along_rows else width))
    parts = 1
    programs = -(-rows // height)
    while programs * parts < chip.units and points(task.reduce) // parts >= 8192 and splits(form, parts * 2, 1024):
        parts *= 2
    moved = size * programs * parts * _AHEAD
    while moved * height * width < _LATENCY * chip.bandwidth and width < cols // parts and height * width < 2 * lanes:
        width *= 2
    ahead = form.kind == "reduce" and chip.backend == "cuda" and (_AHEAD + 1) * _tile_bytes(task, height, width) <= _RING
    return KernelConfig(
        rows=height,
        cols=max(1, width),
        num_warps=4 if height * width >= 512 else 1,
        split_k=parts,
        num_stages=_AHEAD + 1 if ahead else 1,
    )


def _tile_bytes(task: Task, height: int, width: int) -> int:
    """Bytes that a tile of rows and columns loads."""
    rows, cols = ({d.name for d in dims if d.size > 1} for dims in (task.dims, task.reduce))
    used = [(a, task.read_dims(p)) for p, a in task.reads.items()]
    return sum(itemsize(a.dtype) * (height if d & rows else 1) * (width if d & cols else 1) for a, d in used)


def _moved_along(task: Task, dims: tuple[Dim, ...]) -> int:
    """Bytes of the reads that lie contiguous along some of the dimensions and along none of the others."""
    ranges, others = task.ranges, tuple(d for d in (*task.dims, *task.reduce) if d not in dims)
    found = [(p, a) for p, a in task.reads.items() if contiguous(a, dims) and not contiguous(a, others)]
    return sum(itemsize(a.dtype) * prod(ranges[n] for n in task.read_dims(p)) for p, a in found)


def _gather_tile(task: Task, s: Selection) -> KernelConfig:
    """Tiles of 2048 elements, long along the columns."""
    rows, columns = split_selection(task, s)
    width = min(1024, power_of_two(points(columns)))
    height = max(1, min(power_of_two(points(rows)), 2048 // width))
    return KernelConfig(rows=height, cols=width, num_warps=4 if height * width >= 512 else 1)


def _scan(task: Task) -> KernelConfig:
    """Tiles of 2048 elements, long along what lies contiguous in memory."""
    rows, steps = points(task.dims), points(task.reduce)
    along = any(a.offset.coef(task.reduce[0].name) in (1, -1) for a in task.reads.values())
    width = min(power_of_two(steps), 1024 if along else 64)
    height = min(power_of_two(rows), max(1, 2048 // width))
    return KernelConfig(rows=height, cols=width, num_warps=4 if height * width >= 512 else 1)


def contiguous(access: Access, dims: tuple[Dim, ...]) -> bool:
    """Whether neighbours along one of the dimensions are neighbours in memory."""
    return any(access.offset.coef(d.name) in (1, -1) and d.size > 1 for d in dims)


def default_config(form: KernelForm, target: str = "sm90") -> KernelConfig:
    """The candidate that the model takes for the fastest on a target of `chips.CHIPS`.

    Raises:
        TapestryError: unknown target.
    """
    return next(candidates(form, target))


def candidates(form: KernelForm, target: str = "sm90") -> Iterator[KernelConfig]:
    """KernelConfig worth measuring, each once, the model's choice first; every one of them fits the target.

    Raises:
        TapestryError: unknown target.
    """
    chip = chip_of(target)
    form = on_chip(form, chip)
    if form.product is not None:
        found = _either(form, chip)
    elif form.kind == "stream" and form.streamed is not None:
        found = _stream(form, form.streamed, chip)
    else:
        found = neighbours(memory_config(form, chip), form, chip)
    seen: set[KernelConfig] = set()
    for k in found:
        if k not in seen:
            seen.add(k)
            yield k


# contractions -----------------------------------------------------------------------------------------------------------

# (bm, bn, bk, stages, warps) for operands of 16 or 8 bits; bk counts elements of 2 bytes. The large ones are those that
# Inductor seeds its persistent TMA template with on Hopper, the others halve them down to what small extents fill.
_HALF = (
    (128, 256, 64, 3, 8), (256, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 32, 64, 4, 4), (64, 32, 64, 4, 4), (64, 16, 128, 4, 4),
    (32, 64, 64, 4, 4), (32, 32, 64, 4, 2), (16, 64, 64, 4, 4), (16, 32, 128, 4, 2), (16, 16, 128, 4, 1),
)  # fmt: skip
_TF32 = (
    (128, 128, 32, 3, 8),
    (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4),
    (64, 64, 32, 4, 4),
    (64, 32, 32, 4, 4),
    (32, 32, 32, 3, 4),
    (16, 16, 32, 3, 4),
)
_IEEE = (
    (64, 64, 16, 3, 4),
    (64, 32, 16, 3, 4),
    (32, 64, 16, 3, 4),
    (32, 32, 16, 3, 4),
    (32, 32, 32, 3, 4),
    (16, 32, 32, 3, 2),
    (32, 16, 32, 3, 2),
    (16, 16, 32, 3, 1),
)
_PARTS = (1, 2, 4, 8, 16)
_LAUNCH = 3e-6  # seconds that a second pass takes besides its bytes
_FULL_TILE = 128 * 256 / (128 + 256)  # multiply-adds per element that is loaded, of the largest tile in `_HALF`
# What plain loads reach of the rate of tiles copied by descriptors: on large squares on Hopper 0.7 to 0.8 of cuBLAS
# (triton#2339, tilelang#1787) beside 0.85 to 0.97 with TMA and a persistent grid (tritonbench#894).
_PLAIN_LOADS = 0.8
# Bandwidth of the L2 cache as a multiple of the memory's: 5,120 bytes per clock (NVIDIA A100 white paper, 2020) are 9.0 TB/s at
# an H100's 1.755 GHz, 2.7 times its 3.35 TB/s and 2.1 times what was measured of an H200.
_CACHE = 2.5
# Share of the memory's bandwidth that far fewer programs than multiprocessors reach; it grows linearly to all of it. An
# assumption, not a measurement: it prefers many small tiles where memory decides (16 x 4096 x 4096).
_FEW_PROGRAMS = 0.25
_GATHERED = 2.5e12  # FLOP/s of a multiprocessor whose operands come one element at a time: loads decide, not matrix units
_SHORT = 24  # instructions for each result that are done beside a sum in every register (`tiles.instructions`)
_FILL = 1.2e-6  # seconds from a program's start to its first product, and for its epilogue


def _either(form: KernelForm, chip: Chip) -> Iterator[KernelConfig]:
    """Candidates of a contraction on its operands as they are and, where that helps, on copies of them, by predicted time."""
    found = _together_or_apart(form, chip)
    if (on_copies := form.packed) is not None and (chip.descriptors or not on_copies.padded):  # else masks cut rows up
        cost = on_copies.moved / chip.bandwidth + _LAUNCH * on_copies.repeated
        more = _together_or_apart(on_copies.product, chip)
        found = sorted([*found, *((t + cost, replace(k, packed=True)) for t, k in more)], key=lambda f: f[0])
    best = [k for _, k in found[:24]]
    yield next(k for k in best if not k.warp_specialize)  # which nothing has measured
    yield from best


def _together_or_apart(form: KernelForm, chip: Chip) -> list[tuple[float, KernelConfig]]:
    """Candidates of a contraction with their predicted times, the fastest first; of sums side by side, also of each alone."""
    found = _dot(form, chip)
    if each := siblings(form):
        alone = _dot(each.forms[0], chip, len(each.forms))
        found = sorted([*found, *((t, replace(k, apart=True)) for t, k in alone if k.split_k == 1)], key=lambda f: f[0])
    return found


def _dot(form: KernelForm, chip: Chip, kinds: int = 1) -> list[tuple[float, KernelConfig]]:
    """Candidates of a contraction with their predicted times, the fastest first, of ``kinds`` like this one in one grid."""
    c, f = form.product, form.folded
    assert c is not None
    held = len(c.pairs) + (_lanes_held(form.task, f) if f else 0)
    m, n, crowded = points(c.m), points(c.n), _crowded(form, c, chip)
    half = c.operand != "f32"
    ready = chip.descriptors and operand_boxes(form.task, c) is not None and not sorted_rows(form)
    size, smooth = operand_size(c.operand), _smooth(form, c)
    rough = half and not c.masked and not (ready or aligned(form.task, c))
    least = 16 if size > 1 else 32  # points of k that a matrix instruction takes
    tall, wide = len({a for a, _ in c.pairs}), len({b for _, b in c.pairs})  # distinct factors on either side
    slow = 1.0
    if rough or (half and not ready and not (smooth if size == 1 else _runs(form, c))):  # elements one by one
        slow = max(3.0, chip.rate(c.operand, form.precision) / chip.units / _GATHERED)
    # wgmma and tcgen05 take 64 rows at least
    tall_enough = 64 if (half or form.precision != "ieee") and chip.arch in (90, 100) and m >= 64 and n >= 64 else 16
    table = [row for row in _table(form, half) if row[0] >= tall_enough]
    fewest = min(bm * bn for bm, bn, *_ in table)
    found: list[tuple[float, KernelConfig]] = []
    for bm, bn, bk, stages, warps in table:
        bk = bk * 2 // size if half and not (rough and chip.of_warps) else bk  # elements one by one have a register each
        bk = min(least if c.masked else min(bk, 32) if c.taps and not smooth else bk, max(least, power_of_two(points(c.k))))
        if (bm > max(16, power_of_two(m)) or bn > max(16, power_of_two(n))) and (bm, bn) != table[-1][:2]:
            continue
        if (chip.of_warps and bm * bn * held >= 128 * 128) or (crowded and bm * bn * held > 64 * 32 * warps):
            warps = 8  # sums and operands are all in registers
        if rough and bm * bn > 64 * 32 * warps:
            continue  # a load for each element, with its address and mask in registers
        most = (128 * 256 if held == 1 or chip.arch in (90, 100) else 128 * 128) if half else 64 * 64 * 2
        if bm * bn * held > max(most, bm * bn if held == 1 else fewest * held):
            continue  # each sum has an accumulator of its own, and each lane of a product that taps are merged into
        if (crowded and bm * bn * held > 64 * 32 * warps and bm * bn > fewest) or (
            c.operand == "i8" and chip.of_warps and bm * bn * len(c.pairs) > 128 * 128
        ):
            continue  # ptxas spills
        stages = min(stages, 2) if chip.backend == "hip" else stages
        step = (bm * tall + bn * wide) * bk * size
        stages = max(min(stages, 2), min(stages, chip.shared // step))
        if (shared := stages * step) > chip.shared and chip.backend != "hip":
            continue
        stored = shared + bm * bn * _stored(form, chip)
        for parts in fold_parts(form, bm, bn, chip) if f else _PARTS:
            if parts > 1 and not splits(form, parts, 1 if f else bk):
                continue
            config = KernelConfig(bm=bm, bn=bn, bk=bk, num_warps=warps, num_stages=stages, split_k=parts)
            forms = _with_room(_forms(config, ready, c, form.task, chip, stored, flat=kinds == 1), half and chip.arch == 90)
            found += [(slow * t, k) for t, k in (_timed(each, form, c, chip, step, kinds) for each in forms)]
    return sorted(found, key=lambda f: f[0])


def _crowded(form: KernelForm, c: Contraction, chip: Chip) -> bool:
    """Whether registers have no room: for what becomes of the sums, for operands that are widened in them, for running sums
    beside the accumulators (`emit_dot.dot_options`)."""
    widened = chip.of_warps and not c.kinds <= {c.operand, "f32"}
    return (
        widened or _after(form) > (_SHORT // 2 if chip.arch == 100 else _SHORT) or (c.operand == "f8" and chip.arch in (89, 90))
    )


def _with_room(forms: Iterable[KernelConfig], wanted: bool) -> Iterator[KernelConfig]:
    """Configs, and where that is wanted those of four stages with three, which leaves room for another program."""
    for k in forms:
        yield k
        if wanted and k.num_stages == 4 and not k.persistent:
            yield replace(k, num_stages=3)


def _programs(k: KernelConfig, form: KernelForm, c: Contraction, chip: Chip, step: int) -> int:
    """Programs that share a multiprocessor, by shared memory (``step`` bytes a stage) and registers.

    A thread has its share of the sums, as much again where much is done behind them, and some 30 registers for addresses and
    loops (read off kernels for sm90).
    """
    if k.persistent or k.warp_specialize:
        return 1
    sums = k.bm * k.bn * len(c.pairs) // (chip.warp * k.num_warps)
    registers = min(k.registers, sums + 30 + min(_after(form), sums))
    return max(
        1, min(chip.shared_unit // (k.num_stages * step + 1024), chip.registers // (registers * chip.warp * k.num_warps))
    )


def _timed(k: KernelConfig, form: KernelForm, c: Contraction, chip: Chip, step: int, kinds: int) -> tuple[float, KernelConfig]:
    """Predicted time; a product that is reduced has no persistent grid."""
    if form.folded:
        k = replace(k, persistent=False)
        return _folded_seconds(k, form, form.folded, chip), k
    extents = points(c.batch), points(c.m), kinds * points(c.n), points(c.k) * points(c.taps)
    known = replace(k, persistent=False) if k.warp_specialize else k
    beside = _programs(known, form, c, chip, step) if c.operand != "f32" and chip.arch == 90 else 1
    sides = len({a for a, _ in c.pairs}), len({b for _, b in c.pairs})
    return _dot_seconds(known, extents, c.operand, form.precision, chip, _after(form), beside, *sides), k


def _after(form: KernelForm) -> int:
    """Instructions for each result behind its sum."""
    return instructions(form.task.then) if form.task.mode == "full" else 0


def _table(form: KernelForm, half: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """(bm, bn, bk, stages, warps). Of whole rows, the depth and stages of others, and warps enough to hold the product and
    what becomes of it."""
    f = form.folded
    table = _HALF if half else _IEEE if form.precision == "ieee" else _TF32
    if f is None or f.row is None:
        return table
    width = max(16, power_of_two(points(f.product.n)))
    _, _, depth, stages, _ = table[0]
    sizes = [(bm, warps) for bm in (128, 64, 32, 16) for warps in (4, 8) if bm * width <= 64 * 32 * warps]
    return tuple((bm, width, depth, stages, warps) for bm, warps in sizes)


def _lanes_held(task: Task, f: Folded) -> int:
    """Values that each lane of a reduced product keeps besides its sum: states, or what folding several fields takes."""
    if f.folds:
        return 1 if len(task.body) > 1 else 0
    return sum(max(1, itemsize(compute(e.dtype)) // 4) for e in task.body)


def fold_parts(form: KernelForm, bm: int, bn: int, chip: Chip) -> list[int]:
    """Numbers of parts of the columns that are folded, where programs that go through all of them do not fill the chip."""
    f = form.folded
    if f is None or not f.folds or f.row or form.task.mode != "full":
        return [1]
    c = f.product
    programs = points(c.batch) * -(-points(c.m) // bm)
    wanted = min(2 * chip.units // max(1, programs), points(c.n) * points(f.outer) // bn)
    longest = max((d.size for d in form.task.reduce), default=1)
    return [1, *(p for p in range(2, wanted + 1) if longest % p == 0)]


def _folded_seconds(k: KernelConfig, form: KernelForm, f: Folded, chip: Chip) -> float:
    """Predicted time of a product that is reduced tile by tile: its tiles, as programs go through them, one after another."""
    c = f.product
    depth = points(c.k) * points(c.taps)
    batch, m, n = points(c.batch), points(c.m), points(c.n)
    turns = -(-points(f.outer) * (-(-n // k.bn) if f.folds else 1) // k.split_k)
    tall, wide = -(-m // k.bm), 1 if f.folds else -(-n // k.bn)
    if made := sorted_rows(form):  # of each matrix one tile is not full: half of it on average
        found, rows = made
        turns, spare = 1, min(found.over.size, points(rows)) // 2
        tall, wide = (tall + spare, wide) if rows == c.m else (tall, wide + spare)
    programs = batch * tall * wide * k.split_k
    one = replace(k, split_k=1)
    each = _dot_seconds(one, (1, min(m, k.bm), min(n, k.bn), depth), c.operand, form.precision, chip) - _FILL
    whole = _dot_seconds(one, (batch * (1 if made else points(f.outer)), m, n, depth), c.operand, form.precision, chip)
    fields = sum(itemsize(compute(e.dtype)) for e in form.task.body)
    second = 0.0 if k.split_k == 1 else _LAUNCH + 2 * k.split_k * batch * m * fields / chip.bandwidth
    return max(-(-programs // chip.units) * turns * max(0.0, each) + _FILL, whole) + second


def _forms(
    config: KernelConfig, ready: bool, c: Contraction, task: Task, chip: Chip, held: int, *, flat: bool
) -> Iterator[KernelConfig]:
    """The same tiles with plain loads, and with descriptors where the chip has them, on a persistent grid where that pays.

    ``held`` are the bytes of shared memory that a persistent program needs: it loads a tile while it stores another. Not where
    tiles are of different sums (``flat``): Triton 3.6 serialises the products of such a loop.
    """
    if ready and config.bm >= 64 and config.bn >= 16:
        tiles = -(-points(c.m) // config.bm) * -(-points(c.n) // config.bn) * points(c.batch) * config.split_k
        alone = 2 * held > chip.shared  # else another program of the multiprocessor computes while one stores
        pays = flat and tiles > chip.units and alone and held <= chip.shared and plain_results(task)
        yield replace(config, descriptors=True, persistent=pays)
        large = config.bm * config.bn >= 128 * 128 and tiles > chip.units and held <= chip.shared
        if flat and chip.arch == 90 and c.operand in HALVES and points(c.batch) == 1 and large and not task.inner:
            yield replace(config, descriptors=True, persistent=True, num_warps=4, warp_specialize=True)
    yield config


def _stored(form: KernelForm, chip: Chip) -> int:
    """Bytes of shared memory per cell of a tile that is stored: the results on their way to a descriptor.

    On Blackwell, sums that meet something that is read are laid out anew, in f32.
    """
    task = form.task
    met = chip.arch == 100 and task.mode == "full" and bool(arg_positions(task.then))
    return max(itemsize(a.dtype) for a in task.outs) + (4 if met else 0)


def _dot_seconds(
    k: KernelConfig,
    extents: tuple[int, int, int, int],
    operand: str,
    precision: str,
    chip: Chip,
    after: int = 0,
    programs: int = 1,
    tall: int = 1,
    wide: int = 1,
) -> float:
    """Predicted time: whole waves of tiles at the rate that a tile of this shape reaches, against memory's time.

    ``after`` are instructions for each result: behind the sums of a multiprocessor's only program, matrix units have nothing
    to do. Of several ``programs`` one multiplies while another one is behind its sums.

    Sums side by side have one factor in common and ``tall`` or ``wide`` others; each product is as wide as a tile.
    A tile's rate grows with its products per element staged, bm*bn/(bm+bn), up to 128 x 256; descriptors and persistence take
    the addresses and the start of each tile out of the way.
    """
    batch, m, n, depth = extents
    size = operand_size(operand)
    reuse = min(1.0, (k.bm * k.bn / (k.bm + k.bn) / _FULL_TILE) ** 0.5)
    rate = chip.rate(operand, precision) / chip.units * reuse * (1.0 if k.descriptors else _PLAIN_LOADS)
    tiles = batch * -(-m // k.bm) * -(-n // k.bn) * k.split_k
    share = -(-depth // k.split_k)
    waves = -(-tiles // chip.units)
    fill = _FILL if k.persistent else _FILL * min(waves, 4)
    products = waves * max(tall, wide) * 2 * k.bm * k.bn * -(-share // k.bk) * k.bk / rate
    behind = waves * k.bm * k.bn * after / (chip.card.vector / 2 / chip.units)
    beside = max(1, min(programs, waves))
    compute = max(products, behind) + (min(products, behind) + fill) / beside
    moved = batch * (tall * m * depth + depth * wide * n + max(tall, wide) * m * n) * size
    from_cache = tiles * (tall * k.bm + wide * k.bn) * share * size / (_CACHE * chip.bandwidth)
    reached = min(1.0, _FEW_PROGRAMS + (1 - _FEW_PROGRAMS) * tiles / chip.units)
    memory = max(moved / chip.bandwidth / reached, from_cache)
    second = 0.0 if k.split_k == 1 else _LAUNCH + 2 * k.split_k * batch * max(tall, wide) * m * n * 4 / chip.bandwidth
    return max(compute, memory) + second


def _runs(form: KernelForm, c: Contraction) -> bool:
    """Whether every operand lies contiguous along k or, unchecked, along its own dimension."""
    return all(contiguous(a, c.k) or (not a.checks and contiguous(a, c.m + c.n)) for a in _factor_reads(form, c))


def _smooth(form: KernelForm, c: Contraction) -> bool:
    """Whether every operand lies contiguous along k, so that a tile's rows are copied 16 bytes at a time."""
    return all(contiguous(a, c.k) for a in _factor_reads(form, c))


def _factor_reads(form: KernelForm, c: Contraction) -> list[Access]:
    """The reads that the factors are made of."""
    used = arg_positions(tuple(c.value(e, form.task) for pair in c.pairs for e in pair))
    return [a for p, a in form.task.reads.items() if p in used]


# streaming sums ---------------------------------------------------------------------------------------------------------


# (bm, bn, warps, stages) by the wider of the heads' widths, for 16-bit operands and for f32
_STREAMS = {
    "wide": ((64, 32, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (16, 32, 4, 2)),
    "128": (
        (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2),
        (16, 64, 4, 3), (16, 32, 4, 3),
    ),
    "64": (
        (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 3),
    ),
}  # fmt: skip
_ENOUGH = 128  # programs that keep a chip busy
_PLAIN = {"wide": ((32, 16, 8, 2), (16, 32, 8, 2), (16, 16, 4, 2)), "64": ((32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2))}


def _stream(form: KernelForm, s: Stream, chip: Chip) -> Iterator[KernelConfig]:
    """Candidates of a streaming sum, by rows (bm) and keys (bn) of a tile; the heads' widths are whole."""
    half = s.operand != "f32" and s.weighted in HALVES
    wide = max(points(s.depth), points(s.columns))
    rows, keys = max(16, power_of_two(points(s.rows))), max(16, power_of_two(s.key.size))
    table = _STREAMS["wide" if wide > 128 else "128" if wide > 64 else "64"] if half else _PLAIN["wide" if wide > 64 else "64"]
    if not half and wide > 64 and chip.of_warps:
        table = (table[1], table[0], *table[2:])  # ptxas spills with the other
    if half and 64 < wide <= 128 and chip.arch in (90, 100):
        # a program has the multiprocessor for itself either way: 498 instructions for 128 keys, not 2 x 347 (sm90)
        table = (table[1], table[0], *table[2:])
    if half and 64 < wide <= 128 and chip.backend == "hip":
        table = ((128, 32, 8, 2), *table)  # with more keys the loop with a mask takes every register
    small = {exact_dtype(e) for e in (s.query, s.keys, s.value)} & (FLOAT8 | INT8)
    if half and wide > 64 and not chip.descriptors and small:
        table = tuple(row for row in table if row[0] <= 64)  # what is widened to f16 passes through registers
    tall = points(s.batch) * -(-points(s.rows) // table[0][0])
    boxed = all(stream_boxes(form.task, s)) and not arg_positions((s.score,))  # descriptors alone load in the loop
    for bm, bn, warps, stages in table:
        if bm > rows and bm > 16:
            continue
        bn = min(bn, keys)
        warps = 8 if chip.of_warps and bm >= 128 else warps  # its products take operands from registers
        stages = 1 if chip.backend == "hip" else min(stages, 2) if chip.shared < 200_000 and wide > 64 else stages
        programs = points(s.batch) * -(-points(s.rows) // bm)
        parts = _key_parts(form, programs, s.key.size, bn, chip)
        while bm == 16 < bn and programs * max(parts, default=1) < _ENOUGH:
            bn //= 2  # more parts of fewer keys
            parts = _key_parts(form, programs, s.key.size, bn, chip)
        base = KernelConfig(bm=bm, bn=bn, num_warps=warps if bm * bn >= 32 * 32 or not half else 4, num_stages=stages)
        ready = chip.descriptors and half
        for split in sorted({1, *parts}, reverse=tall < chip.units):
            yield replace(base, split_k=split, descriptors=ready)
            if half and _hides_keys(s):
                yield replace(base, split_k=split, descriptors=ready, one_loop=True)
            if ready:
                yield replace(base, split_k=split)
        if ready and boxed and chip.arch == 90 and bm == 128 and (bm, bn) == table[0][:2]:
            special = replace(base, num_warps=4, num_stages=2, descriptors=True, one_loop=_hides_keys(s))
            yield replace(special, warp_specialize=True)  # the first thing that is tuned


def _hides_keys(s: Stream) -> bool:
    """Whether keys weigh nothing by their places, so that there may be tiles of them with a mask and without."""
    tests = [
        x.args[0] for x in walk(s.score) if isinstance(x, Call) and x.fn == "where" and x.args[2] == s.weights.hidden(x.dtype)
    ]
    return any(isinstance(y, Index) for test in tests for y in walk(test))


def _key_parts(form: KernelForm, programs: int, keys: int, bn: int, chip: Chip) -> list[int]:
    """Numbers of parts of the keys that fill the chip (flash-decoding), when the other dimensions do not."""
    few = form.streamed is not None and points(form.streamed.rows) <= 16  # decoding: keys alone can fill the chip
    if programs >= min(_ENOUGH, chip.units) or keys < (_ENOUGH if few else 8 * bn):
        return []
    most = min(2 * chip.units // programs, -(-keys // bn))
    wanted = [next((p for p in range(most, most // 2, -1) if keys % (p * bn) == 0), 0) or most_parts(keys, most), most // 2]
    return [p for p in wanted if p > 1 and splits(form, p, bn)]
