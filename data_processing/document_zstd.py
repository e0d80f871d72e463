"""Streams over .zst files, on the optional package `zstandard`.

The package's own stream reader ends in silence when a file is cut off in the middle; this one knows whether the
last frame was whole, and reads files of several frames (what `zstd -T0` or `cat a.zst b.zst` write).
"""

import io
from typing import BinaryIO

from configs.errors import missing_extra

CHUNK_BYTES = 1 << 16  # compressed bytes a read: small, because a chunk may unfold to thousands of times its size
LEVEL = 3


def import_zstandard():
    """The package, or the UserError that names the install command."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_extra("zstandard", "data") from error
    return zstandard


class ZstdReader(io.RawIOBase):
    """A readable raw stream over zstd frames; EOFError when the last frame is cut off or the data is broken."""

    def __init__(self, raw: BinaryIO):
        self.zstandard = import_zstandard()
        self.raw = raw
        self.frame = None  # the decompressor of the frame in progress, None between frames
        self.waiting = b""  # compressed bytes read beyond the end of a frame
        self.unfolded = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.unfolded:
            chunk = self.waiting or self.raw.read(CHUNK_BYTES)
            if not chunk:
                if self.frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self.unfolded = memoryview(self._unfold(chunk))
        count = min(len(buffer), len(self.unfolded))
        buffer[:count] = self.unfolded[:count]
        self.unfolded = self.unfolded[count:]
        return count

    def _unfold(self, chunk: bytes) -> bytes:
        if self.frame is None:
            self.frame = self.zstandard.ZstdDecompressor().decompressobj()
        try:
            data = self.frame.decompress(chunk)
        except self.zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        self.waiting = self.frame.unused_data if self.frame.eof else b""
        if self.frame.eof:
            self.frame = None
        return data


def open_zstd_reader(raw: BinaryIO) -> BinaryIO:
    """A buffered binary reader of the unfolded bytes."""
    return io.BufferedReader(ZstdReader(raw), 1 << 20)


def open_zstd_writer(raw: BinaryIO):
    """A context manager that compresses what is written to it; `raw` stays open."""
    return import_zstandard().ZstdCompressor(level=LEVEL).stream_writer(raw, closefd=False)
