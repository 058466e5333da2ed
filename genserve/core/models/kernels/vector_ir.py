"""Sixteen-lane vector operations for Numba kernels, written as LLVM vector IR.

Numba's own loops don't know that two arrays never overlap, so it stores and reloads accumulators on
every iteration; these intrinsics keep them in registers. LLVM splits the vectors to whatever the
processor has (AVX-512, AVX2, NEON). Addresses are plain integers; the caller answers for bounds.
Names: `f32x16` is sixteen floats; KV elements are float32, or bfloat16 with the suffix `_bf16`.
"""

from __future__ import annotations

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


def _scores_body(load, num_dims, kv_bytes):
    def body(builder, query, keys, out):
        sums = [_load(builder, out)] + [_lanes(_V, 0.0)] * 3
        for dim in range(num_dims):
            q = _splat(builder, _load_scalar(builder, query, 4 * dim))
            k = load(builder, keys, kv_bytes * LANES * dim)
            sums[dim % 4] = _fma(builder, q, k, sums[dim % 4])
        total = builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
        _store(builder, total, out)

    return body


def _values_body(load, num_tokens, num_vectors, kv_bytes):
    def body(builder, weights, values, out, token_stride):
        sums = [_load(builder, out, 64 * j) for j in range(num_vectors)]
        for token in range(num_tokens):
            w = _splat(builder, _load_scalar(builder, weights, 4 * token))
            row = builder.add(values, builder.mul(token_stride, ir.Constant(token_stride.type, token)))
            for j in range(num_vectors):
                sums[j] = _fma(builder, w, load(builder, row, kv_bytes * LANES * j), sums[j])
        for j in range(num_vectors):
            _store(builder, sums[j], out, 64 * j)

    return body


@intrinsic
def scores_16(context, query, keys, out):
    """out[16 tokens] += sum over 16 dims of query[dim] * keys[dim][16 tokens]."""
    return _void(3, _scores_body(_load, 16, 4))


@intrinsic
def scores_16_bf16(context, query, keys, out):
    return _void(3, _scores_body(_load_bf16, 16, 2))


@intrinsic
def scores_1(context, query, keys, out):
    """The same for one dim."""
    return _void(3, _scores_body(_load, 1, 4))


@intrinsic
def scores_1_bf16(context, query, keys, out):
    return _void(3, _scores_body(_load_bf16, 1, 2))


@intrinsic
def values_64(context, weights, values, out, token_stride):
    """out[64 dims] += sum over 16 tokens of weights[token] * values[token][64 dims]."""
    return _void(4, _values_body(_load, 16, 4, 4))


@intrinsic
def values_64_bf16(context, weights, values, out, token_stride):
    return _void(4, _values_body(_load_bf16, 16, 4, 2))


@intrinsic
def values_16(context, weights, values, out, token_stride):
    """The same for 16 dims."""
    return _void(4, _values_body(_load, 16, 1, 4))


@intrinsic
def values_16_bf16(context, weights, values, out, token_stride):
    return _void(4, _values_body(_load_bf16, 16, 1, 2))


@intrinsic
def value_16(context, weights, values, out, token_stride):
    """One token, 16 dims."""
    return _void(4, _values_body(_load, 1, 1, 4))


@intrinsic
def value_16_bf16(context, weights, values, out, token_stride):
    return _void(4, _values_body(_load_bf16, 1, 1, 2))


@intrinsic
def max_16(context, values, out):
    """out = max(out, values), lane by lane."""

    def body(builder, values, out):
        x, y = _load(builder, values), _load(builder, out)
        _store(builder, builder.select(builder.fcmp_ordered(">", x, y), x, y), out)

    return _void(2, body)


@intrinsic
def scale_16(context, values, factor):
    """values *= factor."""

    def codegen(context, builder, signature, arguments):
        values, factor = arguments
        _store(builder, builder.fmul(_load(builder, values), _splat(builder, factor)), values)
        return context.get_dummy_value()

    return types.void(_ADDRESS, types.float32), codegen


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


def linear_block(num_rows, load, weight_bytes):
    """An intrinsic: out[num_rows][32] += x[num_rows][count] @ panel[count][32], x and sums float32.

    Arguments: x, its row stride, panel, count, out, its row stride, ahead, ahead step (strides in
    bytes). The sums stay in registers; each output is one chain of fused multiply-adds in the order
    of the inner index, so it does not depend on `num_rows`. Meanwhile the cache lines at
    `ahead + i * ahead_step` are fetched: weights wanted next.
    """

    def codegen(context, builder, signature, arguments):
        x, x_stride, panel, count, out, out_stride, ahead, ahead_step = arguments

        def const(value):
            return ir.Constant(count.type, value)

        sums = [
            [cgutils.alloca_once_value(builder, _lanes(_V, 0.0)) for _ in range(2)] for _ in range(num_rows)
        ]
        rows = [builder.add(x, builder.mul(x_stride, const(row))) for row in range(num_rows)]
        with cgutils.for_range(builder, count) as loop:
            at_panel = builder.add(panel, builder.mul(loop.index, const(2 * LANES * weight_bytes)))
            weights = [load(builder, at_panel, LANES * weight_bytes * j) for j in range(2)]
            _prefetch(builder, builder.add(ahead, builder.mul(loop.index, ahead_step)))
            offset = builder.mul(loop.index, const(4))
            for row in range(num_rows):
                value = _splat(builder, _load_scalar(builder, builder.add(rows[row], offset)))
                for j in range(2):
                    total = _fma(builder, value, weights[j], builder.load(sums[row][j]))
                    builder.store(total, sums[row][j])
        for row in range(num_rows):
            at_out = builder.add(out, builder.mul(out_stride, const(row)))
            for j in range(2):
                total = builder.fadd(_load(builder, at_out, 64 * j), builder.load(sums[row][j]))
                _store(builder, total, at_out, 64 * j)
        return context.get_dummy_value()

    @intrinsic
    def block(context, x, x_stride, panel, count, out, out_stride, ahead, ahead_step):
        return types.void(*[_ADDRESS] * 8), codegen

    return block


# One name each, since Numba inlines what it finds under a global name.
(
    linear_1,
    linear_2,
    linear_3,
    linear_4,
    linear_5,
    linear_6,
    linear_7,
    linear_8,
    linear_9,
    linear_10,
    linear_11,
    linear_12,
) = (linear_block(num_rows, _load, 4) for num_rows in range(1, 13))
(
    linear_1_bf16,
    linear_2_bf16,
    linear_3_bf16,
    linear_4_bf16,
    linear_5_bf16,
    linear_6_bf16,
    linear_7_bf16,
    linear_8_bf16,
    linear_9_bf16,
    linear_10_bf16,
    linear_11_bf16,
    linear_12_bf16,
) = (linear_block(num_rows, _load_bf16, 2) for num_rows in range(1, 13))
