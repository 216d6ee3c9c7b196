"""Compiles kernels with the system's C++ compiler on first use, and keeps them in a cache; and
gives them memory in large pages.

The cache is one folder per user that nobody else can write to, because a library that is loaded
runs. Files are named by a hash of the sources, the flags, the compiler and the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ... import checks
from ..dispatch import NoKernel, constant_when_compiled

#: The folder of the headers that all kernels may include.
SHARED = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-math-errno", "-fopenmp")
#: Compiler flags by the name in TRELLIS_NATIVE_TARGET. The tests compile for other targets than
#: "native" too.
TARGETS = {
    "native": ("-march=native",),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
    "sanitize": (
        "-march=native", "-O1", "-g", "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ),
}  # fmt: skip


log = logging.getLogger("trellis")


@dataclass(frozen=True)
class Source:
    """The files of one library: `name`.cpp in `folder`, and the headers that it includes.

    headers: files in `folder`. shared: files in SHARED.
    """

    name: str
    folder: Path
    headers: tuple[str, ...]
    shared: tuple[str, ...]

    @property
    def main(self) -> Path:
        return self.folder / f"{self.name}.cpp"

    def files(self) -> list[Path]:
        here = [self.folder / header for header in self.headers]
        return [self.main, *here, *(SHARED / header for header in self.shared)]


def cache_folder() -> Path:
    """The folder in TRELLIS_CACHE; by default "trellis" in the user's cache folder."""
    given = os.environ.get("TRELLIS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "trellis"


def private_folder(folder: Path) -> Path:
    """Make the folder for this user alone. Raises NoKernel if others could write to it."""
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise NoKernel(f"cannot make the cache folder {folder}: {error}") from error
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise NoKernel(f"the cache folder {folder} belongs to another user; set TRELLIS_CACHE")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoKernel(
            f"others can write to the cache folder {folder}, and its libraries are executed: "
            f"run chmod go-w {folder}, or set TRELLIS_CACHE to a folder of your own"
        )
    return folder


def find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if name and (path := shutil.which(name)):
            return path
    looked = named or ", ".join(COMPILERS)
    raise NoKernel(
        f"no C++ compiler (looked for {looked}); install one, e.g. g++ (apt install g++), "
        "or name it in CXX"
    )


def load(source: Source) -> ctypes.CDLL:
    """The library for the target in TRELLIS_NATIVE_TARGET. Raises NoKernel where there is none."""
    return open_library(library(source, os.environ.get("TRELLIS_NATIVE_TARGET", "native")))


def missing(load: Callable[[], object], instead: str) -> Callable[[], str]:
    """A function that says why there is no kernel, such as "no C++ compiler"; empty if there is.

    load: loads the kernel or raises NoKernel; it is called once, and may compile. instead: what
    happens without the kernel, such as "norms run unfused", which is logged once with the reason.
    """

    @functools.cache
    def reason() -> str:
        try:
            load()
        except NoKernel as error:
            log.warning("%s: %s", instead, error)
            return str(error)
        return ""

    @constant_when_compiled
    def missing_kernel() -> str:
        return reason()

    missing_kernel.cache_clear = reason.cache_clear  # type: ignore[attr-defined]
    return missing_kernel


def open_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise NoKernel(f"cannot load the compiled kernel: {error}") from error


def library(source: Source, target: str = "native") -> Path:
    """The path of the compiled source, which is compiled now unless it is in the cache.

    Raises NoKernel, whatever goes wrong, and ValueError for an unknown target.
    """
    checks.choice("TRELLIS_NATIVE_TARGET", target, tuple(TARGETS))
    try:
        return _library(source, target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, NoKernel):
            raise
        raise NoKernel(f"the kernel could not be compiled: {error}") from error


def _library(source: Source, target: str) -> Path:
    compiler = find_compiler()
    flags = (*FLAGS, *TARGETS[target])
    folder = private_folder(cache_folder())
    path = folder / f"{source.name}-{_key(source, compiler, flags)}.so"
    if path.exists():
        return path
    with _locked(folder / "lock"):
        if not path.exists():  # another process may have compiled it while this one waited
            _compile(source, compiler, flags, path)
    return path


def _key(source: Source, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in source.files():
        digest.update(file.read_bytes())
    digest.update(repr((compiler, _version(compiler), flags, _cpu(), _global_openmp())).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _version(compiler: str) -> str:
    out = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return out.stdout


@functools.cache
def _cpu() -> str:
    """The features of the CPU, which -march=native depends on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _global_openmp() -> bool:
    """Whether the OpenMP runtime that torch has loaded can be linked to.

    A second runtime would bring a second pool of threads, which fights with torch's for the cores.
    """
    return sys.platform == "linux" and hasattr(_process(), "GOMP_parallel")


def _compile(source: Source, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made = Path(work) / "made.o"
        _run([compiler, *flags, f"-I{SHARED}", "-c", str(source.main), "-o", str(made)])
        linked = Path(work) / "made.so"
        link = [f for f in flags if f.startswith("-fsanitize") or f == "-fopenmp"]
        if _global_openmp():
            link.remove("-fopenmp")
        _run([compiler, "-shared", *link, str(made), "-o", str(linked)])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        raise NoKernel(f"the compiler failed: {' '.join(command)}\n{out.stderr[-2000:]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process in at a time; on a system without file locks, every process at once."""
    with path.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def in_large_pages(fresh: Tensor) -> Tensor:
    """Ask Linux to back a large, untouched tensor with pages of 2 MiB.

    With pages of 4 KiB a kernel would spend up to a third of its time on page faults.
    """
    size, page = fresh.numel() * fresh.element_size(), 2**21
    if size >= 4 * page and sys.platform == "linux":
        begin = -(-fresh.data_ptr() // page) * page
        length = (fresh.data_ptr() + size - begin) // page * page
        # Advice, which may fail. 14 is MADV_HUGEPAGE.
        _process().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)
    return fresh


@functools.cache
def _process() -> ctypes.CDLL:
    """The functions of all libraries that this process has loaded, such as those of libc."""
    return ctypes.CDLL(None)
