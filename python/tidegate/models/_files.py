"""Files that are written whole or not at all, and the reading of text and of safetensors."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from ._json import JsonError, parse_json

# A safetensors file begins with the length of its header, which is JSON. The library refuses longer
# headers than this.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_TEMPORARY = ".tmp"
# The metadata that holds the file's checksum: the CRC-32 of all its bytes, in eight hexadecimal
# digits, which count as zeros themselves.
CHECKSUM = "crc32"
_NO_CHECKSUM = "0" * 8


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Writes `data` to a temporary file of the same folder, flushes it to disk, renames it: a kill
    at any moment leaves the earlier file whole.

    Raises:
        OSError: the disk refuses; it names `path`, whose earlier content is untouched.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:  # of a write it names no file, of the rest the temporary one
        raise type(error)(error.errno, error.strerror, str(path)) from error


def clear_temporaries(folder: Path) -> None:
    """Removes what write_atomically() left in `folder` when its process was killed."""
    for left in folder.glob(f".*{_TEMPORARY}"):
        left.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask (mkstemp ignores it); reading it means setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def decode_text(data: bytes, source: object) -> str:
    """UTF-8, whatever the system's encoding is; ValueError, one line that begins with `source`,
    where `data` is something else."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 text: byte {error.start}") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ValueError, one line, when it holds something else."""
    return decode_text(path.read_bytes(), path)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically. Its metadata are in the order of their names, the
    checksum among them, so that one model is one file: the library writes them in any order."""
    from safetensors.torch import save

    content = save(tensors, metadata={**metadata, CHECKSUM: _NO_CHECKSUM})
    values = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:values])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    data = memoryview(content)[values:]
    found = zlib.crc32(data, zlib.crc32(length + text))
    text = text.replace(_entry(_NO_CHECKSUM), _entry(f"{found:08x}"), 1)
    write_atomically(path, b"".join([length, text, data]))


def _entry(checksum: str) -> bytes:
    """The checksum as the header has it."""
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def read_tensors(path: Path, device: Any = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError, one line, when it is not a whole one, or its
    bytes are not those that its checksum was made of. Files without a checksum are taken."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with path.open("rb") as file:
        header = _read_header(path, file)
        noted = None if header is None else _noted_checksum(path, header)
        try:
            tensors = load_file(path, device="cpu" if device is None else str(device))
        except SafetensorError as error:
            raise ValueError(f"{path}: truncated or not a safetensors file: {error}") from error
        if noted is not None:
            _compare_checksum(path, noted, header, file)
    return tensors


def _read_header(path: Path, file: Any) -> bytes | None:
    """Length and header of a safetensors file; None where the library says what is wrong."""
    length = file.read(_LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if size > min(_MAX_HEADER_BYTES, path.stat().st_size - _LENGTH_BYTES):
        return None
    return length + file.read(size)


def _noted_checksum(path: Path, header: bytes) -> str | None:
    """The checksum that the header notes, if any.

    Raises ValueError for a header that the safetensors library would take: with a name twice, of
    which it keeps one tensor, or nested deeply. What the library refuses itself, it is left to
    name."""
    try:
        values = parse_json(header[_LENGTH_BYTES:].decode("utf-8"))
    except (JsonError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: broken safetensors header: {error}") from error
    metadata = values.get("__metadata__") if isinstance(values, dict) else None
    noted = metadata.get(CHECKSUM) if isinstance(metadata, dict) else None
    return noted if isinstance(noted, str) else None


def _compare_checksum(path: Path, noted: str, header: bytes, file: Any) -> None:
    """Raises ValueError where the file's bytes are others than when `noted` was; `file` stands
    behind the header."""
    found = zlib.crc32(header.replace(_entry(noted), _entry(_NO_CHECKSUM), 1))
    while piece := file.read(1 << 24):
        found = zlib.crc32(piece, found)
    if noted != f"{found:08x}":
        raise ValueError(
            f"{path}: damaged: its checksum is {found:08x}, and {noted!r} was noted when it was "
            "written"
        )
