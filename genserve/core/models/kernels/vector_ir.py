"""Sixteen-lane vector operations for Numba kernels, written as LLVM vector IR.

Numba's own loops don't know that two arrays never overlap, so it stores and reloads accumulators on
every iteration; these intrinsics keep them in registers. LLVM splits the vectors to whatever the
processor has (AVX-512, AVX2, NEON). Addresses are plain integers; the caller answers for bounds.
Names: `f32x16` is sixteen floats; KV elements are float32, or bfloat16 with the suffix `_bf16`.
"""

from __future__ import annotations

import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_V = ir.VectorType(_F32, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_ADDRESS = types.intp
# 2**x on [-0.5, 0.5]: minimax polynomial, relative error 1e-7.
_EXP2: tuple[float, ...] = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3)
_EXP2 += (5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0)


def _at(builder, address, offset_bytes, kind):
    if offset_bytes:
        address = builder.add(address, ir.Constant(address.type, offset_bytes))
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder, address, offset_bytes=0):
    value = builder.load(_at(builder, address, offset_bytes, _V))
    value.align = 4
    return value


def _load_bf16(builder, address, offset_bytes=0):
    raw = builder.load(_at(builder, address, offset_bytes, _VI16))
    raw.align = 2
    return builder.bitcast(builder.shl(builder.zext(raw, _VI32), _lanes(_VI32, 16)), _V)


def _store(builder, value, address, offset_bytes=0):
    builder.store(value, _at(builder, address, offset_bytes, _V)).align = 4


def _load_scalar(builder, address, offset_bytes=0):
    value = builder.load(_at(builder, address, offset_bytes, _F32))
    value.align = 4
    return value


def _lanes(kind, value):
    return ir.Constant(kind, [value] * LANES)


def _splat(builder, scalar):
    undefined = ir.Constant(_V, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _lanes(_VI32, 0))


def _call(builder, name, *arguments):
    kind = ir.FunctionType(_V, [_V] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _fma(builder, x, y, z):
    return _call(builder, "llvm.fma.v16f32", x, y, z)


def _exp2(builder, x):
    """2 ** x, to 1e-7, for x of at most 126."""
    # Under 2**-126 is zero enough, and keeps the exponent arithmetic in range. No comparison with
    # NaN holds, so NaN passes through: a broken row must look broken.
    least = _lanes(_V, -126.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    whole = _call(builder, "llvm.floor.v16f32", builder.fadd(x, _lanes(_V, 0.5)))
    part = builder.fsub(x, whole)
    power = _lanes(_V, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = _fma(builder, power, part, _lanes(_V, coefficient))
    exponent = builder.add(builder.fptosi(whole, _VI32), _lanes(_VI32, 127))
    return builder.fmul(power, builder.bitcast(builder.shl(exponent, _lanes(_VI32, 23)), _V))


def _void(num_arguments, body):
    """An intrinsic of `num_arguments` addresses that returns nothing."""

    def codegen(context, builder, signature, arguments):
        body(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[_ADDRESS] * num_arguments), codegen


@intrinsic
def max_16(context, values, out):
    """out = max(out, values), lane by lane."""

    def body(builder, values, out):
        x, y = _load(builder, values), _load(builder, out)
        _store(builder, builder.select(builder.fcmp_ordered(">", x, y), x, y), out)

    return _void(2, body)


@intrinsic
def scale_16(context, values, factor, out):
    """out = values * factor."""

    def codegen(context, builder, signature, arguments):
        values, factor, out = arguments
        _store(builder, builder.fmul(_load(builder, values), _splat(builder, factor)), out)
        return context.get_dummy_value()

    return types.void(_ADDRESS, types.float32, _ADDRESS), codegen


@intrinsic
def widen_16(context, source, target):
    """Sixteen bfloat16 to float32."""

    def body(builder, source, target):
        _store(builder, _load_bf16(builder, source), target)

    return _void(2, body)


@intrinsic
def exp2_16(context, values, scale, shift, total):
    """values = 2 ** (values * scale - shift); total += values."""

    def codegen(context, builder, signature, arguments):
        values, scale, shift, total = arguments
        scaled = builder.fmul(_load(builder, values), _splat(builder, scale))
        result = _exp2(builder, builder.fsub(scaled, _splat(builder, shift)))
        _store(builder, result, values)
        _store(builder, builder.fadd(_load(builder, total), result), total)
        return context.get_dummy_value()

    return types.void(_ADDRESS, types.float32, types.float32, _ADDRESS), codegen


@intrinsic
def rotate_16(context, first, second, cos, sin):
    """first, second = first * cos - second * sin, second * cos + first * sin."""

    def body(builder, first, second, cos, sin):
        a, b, c, s = (_load(builder, each) for each in (first, second, cos, sin))
        _store(builder, builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), first)
        _store(builder, builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), second)

    return _void(4, body)


@intrinsic
def silu_mul_16(context, gate, up, out):
    """out = gate / (1 + exp(-gate)) * up."""

    def body(builder, gate, up, out):
        g = _load(builder, gate)
        # exp(-g) beyond 2**126 would overflow; there g / (1 + exp(-g)) is zero to all digits.
        most = _lanes(_V, 126.0)
        x = builder.fmul(g, _lanes(_V, -1.4426950408889634))
        x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
        sigmoid = builder.fdiv(g, builder.fadd(_lanes(_V, 1.0), _exp2(builder, x)))
        _store(builder, builder.fmul(sigmoid, _load(builder, up)), out)

    return _void(3, body)


@intrinsic
def square_sum_16(context, values, total):
    """total += values * values."""

    def body(builder, values, total):
        x = _load(builder, values)
        _store(builder, _fma(builder, x, x, _load(builder, total)), total)

    return _void(2, body)


@intrinsic
def scaled_product_16(context, values, factor, weights, out):
    """out = (values * factor) * weights."""

    def codegen(context, builder, signature, arguments):
        values, factor, weights, out = arguments
        scaled = builder.fmul(_load(builder, values), _splat(builder, factor))
        _store(builder, builder.fmul(scaled, _load(builder, weights)), out)
        return context.get_dummy_value()

    return types.void(_ADDRESS, types.float32, _ADDRESS, _ADDRESS), codegen


def _move(kind):
    def body(builder, source, target):
        value = builder.load(builder.inttoptr(source, kind.as_pointer()))
        value.align = kind.width // 8
        builder.store(value, builder.inttoptr(target, kind.as_pointer())).align = kind.width // 8

    return body


@intrinsic
def move_4(context, source, target):
    """Copy four bytes."""
    return _void(2, _move(_I32))


@intrinsic
def move_2(context, source, target):
    """Copy two bytes."""
    return _void(2, _move(_I16))


def _prefetch(builder, address):
    """Ask for the cache line at `address`, into the second level. Never faults."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    builder.call(prefetch, [builder.inttoptr(address, pointer), read, second_level, data])


def _row_block(most_rows, num_vectors, load, weight_bytes):
    """An intrinsic: out[row][16 v] += x[row][count] @ panel[count][16 v], for 1 to `most_rows` rows.

    Arguments: number of rows; x and its row stride; panel and its stride from one inner index to the
    next; count; out and its row stride; `ahead` and its step: the cache lines at `ahead + i * step`
    are fetched meanwhile. Strides are in bytes; x, out and the sums are float32.

    The sums stay in registers. Each output is one chain of fused multiply-adds in the order of the
    inner index, so it does not depend on how many rows come together.
    """

    def emit(builder, num_rows, x, x_stride, panel, panel_stride, count, out, out_stride, ahead, step):
        def const(value):
            return ir.Constant(count.type, value)

        sums = [[cgutils.alloca_once(builder, _V) for _ in range(num_vectors)] for _ in range(num_rows)]
        for total in itertools.chain(*sums):
            builder.store(_lanes(_V, 0.0), total)
        rows = [builder.add(x, builder.mul(x_stride, const(row))) for row in range(num_rows)]
        with cgutils.for_range(builder, count) as loop:
            at_panel = builder.add(panel, builder.mul(loop.index, panel_stride))
            weights = [load(builder, at_panel, LANES * weight_bytes * j) for j in range(num_vectors)]
            _prefetch(builder, builder.add(ahead, builder.mul(loop.index, step)))
            offset = builder.mul(loop.index, const(4))
            for row in range(num_rows):
                value = _splat(builder, _load_scalar(builder, builder.add(rows[row], offset)))
                for j in range(num_vectors):
                    total = _fma(builder, value, weights[j], builder.load(sums[row][j]))
                    builder.store(total, sums[row][j])
        for row in range(num_rows):
            at_out = builder.add(out, builder.mul(out_stride, const(row)))
            for j in range(num_vectors):
                total = builder.fadd(_load(builder, at_out, 64 * j), builder.load(sums[row][j]))
                _store(builder, total, at_out, 64 * j)

    def codegen(context, builder, signature, arguments):
        num_rows, *rest = arguments
        end = builder.append_basic_block("rows.end")
        switch = builder.switch(num_rows, end)
        for rows in range(1, most_rows + 1):
            block = builder.append_basic_block(f"rows.{rows}")
            switch.add_case(ir.Constant(num_rows.type, rows), block)
            builder.position_at_end(block)
            emit(builder, rows, *rest)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def block(context, num_rows, x, x_stride, panel, panel_stride, count, out, out_stride, ahead, step):
        return types.void(*[_ADDRESS] * 10), codegen

    return block


# As many rows as leave registers for the panel, with AVX-512.
ROWS_W1, ROWS_W2, ROWS_W4 = 12, 12, 6
multiply_w1 = _row_block(ROWS_W1, 1, _load, 4)
multiply_w1_bf16 = _row_block(ROWS_W1, 1, _load_bf16, 2)
multiply_w2 = _row_block(ROWS_W2, 2, _load, 4)
multiply_w2_bf16 = _row_block(ROWS_W2, 2, _load_bf16, 2)
multiply_w4 = _row_block(ROWS_W4, 4, _load, 4)
multiply_w4_bf16 = _row_block(ROWS_W4, 4, _load_bf16, 2)
