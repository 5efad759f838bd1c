"""Build the stand-in's library from its source, once for each source, torch and compiler."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

__all__ = ["library", "reason_against"]

SOURCE = Path(__file__).with_name("standin.cpp")
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")


@functools.cache
def reason_against() -> str | None:
    """Return why the stand-in cannot be built here, or None."""
    if sys.platform != "linux":
        return f"the stand-in accelerator is built on Linux only, this is {sys.platform}"
    if _compiler() is None:
        return "the stand-in accelerator needs a C++ compiler: c++ or $CXX"
    header = TORCH / "include" / "c10" / "core" / "CachingDeviceAllocator.h"
    if not header.exists() or "getMemoryInfo" not in header.read_text():
        return f"the stand-in accelerator needs DeviceAllocator::getMemoryInfo, which torch {torch.__version__} has not"
    return None


def library() -> Path:
    """Return the built library; processes that ask at the same time wait for the first one."""
    folder = _folder()
    found = folder / f"standin_{_fingerprint()}.so"
    with FileLock(folder / "lock"):
        if not found.exists():
            unfinished = found.with_suffix(".unfinished")
            _compile(unfinished)
            unfinished.rename(found)
    return found


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def _folder() -> Path:
    """The user's own folder: a library of somebody else must not be loaded."""
    folder = Path(tempfile.gettempdir()) / f"normtheory_standin_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR to another folder.")
    return folder


@functools.cache
def _fingerprint() -> str:
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    parts = (SOURCE.read_bytes(), compiler, " ".join(FLAGS).encode(), torch.__version__.encode(), str(TORCH).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(place: Path) -> None:
    include = TORCH / "include"
    command = [
        *(_compiler(), *FLAGS, str(SOURCE), "-o", str(place)),
        *(f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",),
        *(f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The compiler failed on {SOURCE.name}:\n{done.stderr[:3000]}")
