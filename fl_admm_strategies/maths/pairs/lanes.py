"""The update of one vector of a pair, as vector code with a fixed number of partial sums.

In LLVM's own terms, since from a plain loop the compiler makes no fast code here: with a sum in
float64 it works on half vectors, and with one in float32 it may reorder that sum, by the width of
the processor's vectors. Here the order is the same on every processor, every product is rounded
before it is added, and so the bits are the same too.
(numba's cache does not look into this file: when it changes, delete what `kernels_numba` has in
``__pycache__``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 32
_CACHE_LINE = 64  # bytes
_FLAGS = ("nsz",)  # the sign of a zero does not matter


def _renew(
    typing_context: Any,
    row: Any,
    first: Any,
    second: Any,
    old: Any,
    ahead: Any,
    keep: Any,
    count: Any,
) -> Any:
    """Set a row to ``first - second + keep * old`` and return the sum of its squares.

    All but the numbers `keep` and `count` are addresses; `ahead` is a row that is fetched into the
    cache meanwhile. `count` is a multiple of `LANES`. There are so many partial sums, in the
    precision of the rows, so the result is off by at most ``count / LANES`` roundings, relatively.
    """
    return types.float64(*5 * [types.uintp], keep, types.intp), _generate


def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    row, first, second, old, ahead, keep, count = arguments
    number = context.get_value_type(signature.args[5])
    integer, byte, double = ir.IntType(32), ir.IntType(8), ir.DoubleType()
    vector = ir.VectorType(number, LANES)
    size = context.get_abi_sizeof(number)

    def pointer(address: Any, column: Any, kind: Any) -> Any:
        place = builder.add(address, builder.mul(column, column.type(size)))
        return builder.inttoptr(place, kind.as_pointer())

    def load(address: Any, column: Any) -> Any:
        return builder.load(pointer(address, column, vector), align=size)

    def pick(one: Any, places: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(integer, len(places)), list(places))
        return builder.shuffle_vector(one, one, mask)

    zeros = ir.Constant(vector, [0.0] * LANES)
    kept = pick(builder.insert_element(zeros, keep, integer(0)), [0] * LANES)
    variable: Any = cgutils.alloca_once_value  # it has no types
    sums = variable(builder, zeros)
    pointers = [byte.as_pointer()]
    fetch = builder.module.declare_intrinsic(
        "llvm.prefetch", pointers, ir.FunctionType(ir.VoidType(), [*pointers, *3 * [integer]])
    )
    loop = cgutils.for_range_slice(builder, count.type(0), count, count.type(LANES))
    with loop as (column, _):
        for line in range(0, LANES, _CACHE_LINE // size):
            there = pointer(ahead, builder.add(column, column.type(line)), byte)
            builder.call(fetch, [there, integer(0), integer(3), integer(1)])  # to read; data
        difference = builder.fsub(load(first, column), load(second, column))
        carried = builder.fmul(kept, load(old, column), flags=_FLAGS)
        new = builder.fadd(difference, carried, flags=_FLAGS)
        builder.store(new, pointer(row, column, vector), align=size)
        squares = builder.fmul(new, new, flags=_FLAGS)
        builder.store(builder.fadd(builder.load(sums), squares, flags=_FLAGS), sums)
    total, lanes = builder.load(sums), LANES
    if number != double:
        total = builder.fpext(total, ir.VectorType(double, LANES))
    while lanes > 1:
        lanes //= 2
        total = builder.fadd(pick(total, range(lanes)), pick(total, range(lanes, 2 * lanes)))
    return builder.extract_element(total, integer(0))


renew: Any = intrinsic(_renew)
