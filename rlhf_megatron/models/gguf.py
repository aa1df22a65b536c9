"""GGUF files, read through the gguf package, which this project does not depend on.

That package believes what a file says: it makes as many objects as a count asks for, and follows arrays in arrays.
So counts, lengths and types of the metadata are compared before with what the file holds and what a model has.
"""

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from rlhf_megatron.errors import UserError
from rlhf_megatron.untrusted import opened, reason_of, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

Value = TypeVar("Value")
MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Beyond any model: 49,000 tokens and as many merges are 150,000 elements.
MOST_FIELDS, MOST_TENSORS, MOST_ELEMENTS = 4096, 2**17, 2**20
MOST_BYTES = 64 * 2**20
# GGUF's types of values by number, and their bytes.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class GgufFile:
    """A GGUF file's fields and tensors, read through the gguf package."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises UserError if it or the gguf package is missing, or if it is no GGUF file."""
        try:
            package: Any = importlib.import_module("gguf")
            self._quants: Any = importlib.import_module("gguf.quants")
        except ImportError as error:
            raise UserError("reading GGUF files needs the gguf package: pip install gguf") from error
        try:
            check_metadata(path)
            self._reader: Any = package.GGUFReader(str(path))
            self.fields = {name: field.contents() for name, field in self._reader.fields.items()}
        except UserError as error:
            raise UserError(f"--input: {error}") from error
        except (ValueError, IndexError, KeyError, OSError, TypeError, ArithmeticError, MemoryError) as error:
            raise UserError(f"{shown(path)} cannot be read as GGUF ({reason_of(error)}); is it whole?") from error
        self.path = shown(path)

    def field(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return a field of metadata; raises UserError if it is of another type, or missing without a default."""
        value = self.fields.get(name, default)
        if value is None:
            raise UserError(f"{self.path} has no field {name}; only Llama files with their tokenizer can be converted")
        if type(value) is not kind:
            raise UserError(f"{self.path}: {name} is {shown(repr(value), 80)}, which is no {kind.__name__}")
        return value

    def require(self, name: str, wanted: Any) -> None:
        """Raise UserError if a field is not what this converter knows."""
        value = self.field(name, type(self.fields.get(name)))
        if type(value) is not type(wanted) or value != wanted:
            raise UserError(f"{self.path}: {name} is {shown(repr(value))}, and only {wanted!r} can be converted")

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; raises UserError if it is another, or missing."""
        values = self.field(name, list)
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self.path}: {name} is {shown(repr(values[:9]), 80)}, which is no list of texts")
        return values

    def token(self, name: str, default: int | None = None) -> int:
        """Return a field that is a token's id; raises UserError if it is none, or missing without a default."""
        token, count = self.field(name, int, default), len(self.texts("tokenizer.ggml.tokens"))
        if not 0 <= token < count:
            raise UserError(f"{self.path}: {name} is {token}, and there are {count} tokens")
        return token

    def tensors(self) -> dict[str, Any]:
        """Return the tensors by GGUF's names, still quantised."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def expand(self, tensor: Any) -> NDArray[Any]:
        """Return a tensor's values in float32, rows first as in Hugging Face; raises UserError for unknown kinds."""
        try:
            values: NDArray[Any] = self._quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{self.path}: {shown(tensor.name)} has kind {tensor.tensor_type!r}, which the gguf package cannot "
                "expand"
            ) from error
        return values.astype("float32")


def check_metadata(path: Path) -> None:
    """Walk through the counts and fields at the beginning of a GGUF file.

    Raises:
        UserError: it is no regular file or no GGUF, ends before its fields do, or claims more than any model has.
    """
    with opened(path, UserError) as file:
        _Walk(path, file).fields()


class _Walk:
    """A position in the metadata of one file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._left = MOST_BYTES
        self._elements = 0

    def fields(self) -> None:
        """Pass over all fields."""
        if self._bytes(4) != MAGIC:
            raise self._unreadable("it does not begin with GGUF")
        if (version := self._number("<I")) not in VERSIONS:
            raise self._unreadable(f"version {version}; versions 2 and 3, little-endian, are known")
        tensors, fields = self._number("<Q"), self._number("<Q")
        if tensors > MOST_TENSORS or fields > MOST_FIELDS:
            raise self._unreadable(f"it claims {tensors:,} tensors and {fields:,} fields")
        for _ in range(fields):
            self._skip(self._number("<Q"))
            self._value(self._number("<I"))

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._skip(self._number("<Q"))
        elif kind == ARRAY:
            self._array(self._number("<I"), self._number("<Q"))
        else:
            self._skip(self._size(kind))

    def _array(self, kind: int, count: int) -> None:
        self._elements += count
        if self._elements > MOST_ELEMENTS:
            raise self._unreadable(f"its arrays have over {MOST_ELEMENTS:,} elements")
        if kind != STRING:
            self._skip(count * self._size(kind))  # of arrays, there is none in a model's file
            return
        for _ in range(count):
            self._skip(self._number("<Q"))

    def _size(self, kind: int) -> int:
        if kind not in SIZES:
            raise self._unreadable(f"a field of type {kind}, which is not known")
        return SIZES[kind]

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _skip(self, size: int) -> None:
        self._bytes(size)

    def _bytes(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise self._unreadable(f"its fields have over {MOST_BYTES:,} bytes")
        content = self._file.read(size)
        if len(content) < size:
            raise self._unreadable("it ends before its fields do")
        return content

    def _unreadable(self, reason: str) -> UserError:
        return UserError(f"{shown(self._path)} cannot be read as GGUF ({reason}); is it whole?")
