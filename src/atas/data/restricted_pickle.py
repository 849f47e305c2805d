"""An unpickler for numbers, text and numeric arrays in plain containers. It runs no code from the pickle.

Numpy's own classes are not restored either, because a crafted state can corrupt memory through them. Replacements
accept only what a numeric array needs. A first pass over the pickle, which builds nothing, compares the sizes that it
claims with the bytes that it has.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any

import numpy as np

# Numpy 1 and 2 write different names of the same modules.
ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
BUFFER_MODULES = ("numpy.core.numeric", "numpy._core.numeric")


def loads_dict(raw: bytes) -> dict[str, Any]:
    """Return the dict in a pickle, with keys as text and numpy arrays; raise UnpicklingError for other content."""
    try:
        _check_sizes(raw)
        # Python 2 wrote arrays and names as byte strings; latin-1 keeps every byte.
        content = _RestrictedUnpickler(io.BytesIO(raw), encoding="latin-1").load()
        return {_text(key): value.array if isinstance(value, _Array) else value for key, value in content.items()}
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        # A damaged pickle can raise almost anything, from EOFError to MemoryError.
        raise pickle.UnpicklingError(f"it holds no pickled batch ({type(error).__name__}: {error})") from error


def _check_sizes(raw: bytes) -> None:
    """Raise an exception if the pickle claims more bytes than it has, or a place in the unpickler's memo that it cannot
    have reached: the unpickler allocates the memory for either before it looks."""
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= (argument or 0) <= number:
                raise pickle.UnpicklingError(f"it stores object {argument} after {number} operations")
    except ValueError as error:
        raise pickle.UnpicklingError(f"it is truncated or damaged ({error})") from error


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Each result is a new object, because a pickle may set attributes on the objects that it gets.
        if module in ARRAY_MODULES and name == "_reconstruct":
            return lambda *_: _Array()
        if module in BUFFER_MODULES and name == "_frombuffer":
            return lambda raw, dtype, shape, order, *_: _Array().fill(raw, dtype, shape, order)
        if (module, name) == ("numpy", "dtype"):
            return lambda code, *_: _Dtype(code)
        if (module, name) == ("numpy", "ndarray"):
            return None
        if (module, name) == ("_codecs", "encode"):
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"it tries to load {module}.{name}")


class _Dtype:
    def __init__(self, code: str | bytes) -> None:
        self.code = _text(code)
        if not re.fullmatch(r"[buif]\d{1,2}", self.code):
            raise pickle.UnpicklingError(f"it holds an array of type {self.code!r}, not of numbers")
        self.dtype = np.dtype(self.code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"it holds an array of byte order {order!r}")
        self.dtype = np.dtype(order + self.code)


class _Array:
    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: Any, dtype: _Dtype, shape: tuple[int, ...], order: Any) -> _Array:
        data = raw.encode("latin-1") if isinstance(raw, str) else raw
        self.array = np.frombuffer(data, dtype.dtype).reshape(shape, order=order)
        return self


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
