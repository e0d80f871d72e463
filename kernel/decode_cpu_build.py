"""Builds decode_cpu.cpp with the machine's C++ compiler at first use, some five seconds, and keeps it for later runs.

The library lies in ~/.cache/mew under a name that tells source, compiler and processor apart: it uses what this
processor has. It takes torch's own OpenMP library, so that both share one pool of threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("decode_cpu.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC", "-fopenmp")

CONSEQUENCE = "decoding on the CPU goes through PyTorch's operations, which is slower for small models"


@cache
def decode_library() -> ctypes.CDLL | None:
    """The compiled library, or None where there is no compiler that builds it (Linux, g++ or clang++)."""
    compiler = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
    if platform.system() != "Linux":
        return None
    if compiler is None:
        warnings.warn(f"no g++ or clang++ was found; {CONSEQUENCE}; install g++ for the faster way", stacklevel=2)
        return None
    return load_library(compiler, Path.home() / ".cache" / "mew")


def load_library(compiler: str, directory: Path) -> ctypes.CDLL | None:
    """The library of `directory`, built if it is not there; None, with a warning, if it cannot be."""
    path = directory / f"decode_cpu_{build_key(compiler)}.so"
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            build(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        reason = (said.decode(errors="replace").strip().splitlines() or ["no reason given"])[0]
        warnings.warn(f"{SOURCE.name} was not built with {compiler} ({reason}); {CONSEQUENCE}", stacklevel=3)
        return None


def build_key(compiler: str) -> str:
    """What a library depends on, as 16 hex digits."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = [SOURCE.read_bytes(), version, processor(), " ".join(FLAGS).encode(), torch.__version__.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def processor() -> bytes:
    """This processor's name and what it can do: a home directory may be shared by several kinds."""
    path = Path("/proc/cpuinfo")
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = {line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}
    return b"\n".join(sorted(kept)) + platform.machine().encode()


def build(compiler: str, path: Path) -> None:
    """Compile beside `path` and rename, so that nobody loads half a library."""
    openmp = sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*"))
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    command = [compiler, *FLAGS, str(SOURCE), "-o", unfinished, *map(str, openmp[:1])]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=120)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
