"""Triton's interpreter (3.6, 3.7) made to agree with GPUs in bf16 and FP8: for checks where there is no GPU.

Unpatched it multiplies the raw bits of bf16, truncates on the way to bf16 and rounds FP8 wrongly. Here conversions
round to nearest even (FP8 saturates), bf16 arithmetic goes through fp32 and is rounded back, its products are exact.
What stays as it is: `if block:` takes the branch (the compiler rejects it), TF32 is full fp32, programs run one by one.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # what torch takes from numpy
_Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder


def install():
    """Patch the interpreter; a second call does nothing."""
    if getattr(interpreter, "_agrees_with_gpus", False):
        return
    interpreter._agrees_with_gpus = True
    _patch_conversions()
    _patch_arithmetic()
    _patch_reductions()
    _patch_scopes()


def from_bfloat16(bits):
    """fp32 values of bf16 bits."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values):
    """bf16 bits of fp32 values, rounded to nearest even; every NaN is the same one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), rounded)


def _is_bfloat16(handle):
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _widened(handle):
    return _Handle(from_bfloat16(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(values):
    return _Handle(to_bfloat16(values), tl.bfloat16)


def _patch_conversions():
    original = interpreter._convert_float
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def convert(data, source, target, mode):
        if mode == toward_zero or source not in _TORCH_DTYPES or target not in _TORCH_DTYPES:
            return original(data, source, target, mode)
        bits = np.ascontiguousarray(data.reshape(-1))
        values = torch.from_numpy(bits.view(_SIGNED[bits.itemsize]).copy()).view(_TORCH_DTYPES[source])
        values = values.to(torch.float64 if source == tl.float64 else torch.float32)
        target_dtype = _TORCH_DTYPES[target]
        if target_dtype.itemsize == 1:
            largest = torch.finfo(target_dtype).max
            values = torch.where(values.isnan(), values, values.clamp(-largest, largest))
        size = target_dtype.itemsize
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return values.to(target_dtype).view(signed).numpy().view(_BITS[size]).reshape(data.shape)

    interpreter._convert_float = convert
    cast = _Builder.cast_impl

    def cast_impl(self, source, target_type):
        origin, target = source.dtype.scalar, target_type.scalar
        if target == tl.bfloat16 and origin not in (tl.bfloat16, tl.float32):
            return _narrowed(source.data.astype(np.float32))
        if origin == tl.bfloat16 and target not in (tl.bfloat16, tl.float32):
            return _Handle(from_bfloat16(source.data).astype(interpreter._get_np_dtype(target_type)), target)
        return cast(self, source, target_type)

    _Builder.cast_impl = cast_impl
    _Builder.get_bf16 = lambda self, value: _narrowed(np.array([value], dtype=np.float32))


def _patch_arithmetic():
    binary, ternary, unary = _Builder.binary_op, _Builder.ternary_op, _Builder.unary_op
    product, fma = _Builder.create_dot, _Builder.create_fma

    def binary_op(self, left, right, op):
        if not (_is_bfloat16(left) or _is_bfloat16(right)):
            return binary(self, left, right, op)
        result = op(_widened(left).data, _widened(right).data)
        return _Handle(result, tl.int1) if result.dtype == np.bool_ else _narrowed(result)

    def ternary_op(self, first, second, third, op):
        if op is np.where or not _is_bfloat16(first):  # a selection moves bits
            return ternary(self, first, second, third, op)
        return _narrowed(op(*(_widened(handle).data for handle in (first, second, third))))

    def unary_op(self, arg, op):
        return _narrowed(op(_widened(arg).data)) if _is_bfloat16(arg) else unary(self, arg, op)

    def create_dot(self, left, right, total, *rest):
        return product(self, _widened(left), _widened(right), total, *rest)

    def create_fma(self, left, right, total):
        if not _is_bfloat16(left):
            return fma(self, left, right, total)
        return _narrowed(_widened(left).data * _widened(right).data + _widened(total).data)

    _Builder.binary_op, _Builder.ternary_op, _Builder.unary_op = binary_op, ternary_op, unary_op
    _Builder.create_dot, _Builder.create_fma = create_dot, create_fma


def _bits(tensor):
    data = to_bfloat16(tensor.handle.data)
    return data if tensor.type.is_block() else data.reshape(-1)[0]


def _patch_reductions():
    """Reduce and scan in fp32, rounded once at the end: as on a GPU up to the order of the sum."""

    def widening(apply_impl):
        def apply(self, inputs):
            if not any(_is_bfloat16(tensor.handle) for tensor in inputs):
                return apply_impl(self, inputs)
            were = [_is_bfloat16(tensor.handle) for tensor in inputs]
            wide = tuple(
                self.to_tensor(from_bfloat16(tensor.handle.data), tl.float32) if was else tensor
                for tensor, was in zip(inputs, were, strict=True)
            )
            results = apply_impl(self, wide)
            results = tuple(results) if isinstance(results, (list, tuple)) else (results,)
            return tuple(
                self.to_tensor(_bits(result), tl.bfloat16) if was else result
                for result, was in zip(results, were, strict=True)
            )

        return apply

    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = widening(kind.apply_impl)


def _patch_scopes():
    """Patch `triton.language` once a launch, not once a device function: most of a launch's time otherwise."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patch_tensor = interpreter._patch_lang_tensor
    patched = set()

    class NoScope:
        def restore(self):
            """Nothing was patched."""

    def patch_lang(fn):
        key = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if key in patched:
            return NoScope()
        patched.add(key)
        return patch(fn)

    def call(self, *args, **kwargs):
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        # 3.6 leaves the axis in, and numpy 2.4 refuses int() of an array of one element: bounds of loops.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call
    interpreter._patch_lang_tensor = patch_lang_tensor
