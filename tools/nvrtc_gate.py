"""Compile every kernel source with NVRTC 12.8 for every released architecture: the CUDA 12.8 half of the build matrix.

The device compiler of CUDA 12.8 comes as a Python package (nvidia-cuda-nvrtc-cu12), its nvcc does not; so a machine
with neither GPU nor toolkit can still prove that the sources compile there. Headers (.cuh) are compiled alone, which
shows that they include what they use; binding sources (.cu) must yield kernels.

sm_90a is compiled as a release is. The others go without most optimisations, in a quarter of the time: an instruction or
a feature that an architecture lacks is refused either way. ``--optimise`` compiles all as a release is.

Exit status: 0 all compiled, 1 something did not, 2 no NVRTC 12.8 here or no sources.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "packages" / "astrai-kernels" / "csrc"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
OPTIMISED = "sm_90a"
VERSION = (12, 8)
LOG_LINES = 20


class GateError(Exception):
    """NVRTC cannot be used here; the message says what to install."""


@dataclass(frozen=True)
class Result:
    """Outcome of one source for one architecture; ``log`` is empty when it compiled."""

    source: Path
    architecture: str
    kernels: int
    log: str


class Nvrtc:
    """The few calls of NVRTC that a compilation needs.

    Raises
    ------
    GateError
        If the library is missing or of another version than 12.8.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia")
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        libraries = [path for folder in folders for path in Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.12")]
        remedy = "install nvidia-cuda-nvrtc-cu12==12.8.*"
        if not libraries:
            raise GateError(f"NVRTC is not installed for {sys.executable}: {remedy}")
        self._library = ctypes.CDLL(str(libraries[0]))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        if (major.value, minor.value) != VERSION:
            raise GateError(f"NVRTC is {major.value}.{minor.value}, expected 12.8: {remedy}")

    def _check(self, status: int) -> None:
        if status != 0:
            raise GateError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")

    def _text(self, program: ctypes.c_void_p, size_call: str, read_call: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, size_call)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, read_call)(program, buffer))
        return buffer.raw

    def compile(self, source: Path, architecture: str, include: Path, optimise: bool) -> Result:
        """Compile one file to machine code and count its kernels."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.read_bytes(), str(source).encode(), 0, None, None
            )
        )
        try:
            options = [f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={include}"]
            if not optimise:
                options.append("--Ofast-compile=max")
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            if status != 0:
                log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                reason = self._library.nvrtcGetErrorString(status).decode()
                return Result(source, architecture, 0, log.rstrip(b"\0").decode(errors="replace").strip() or reason)
            code = self._text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
            kernels = len(set(re.findall(rb"\.nv\.constant0\.(\w+)", code)))  # only kernels have parameters there
            empty = source.suffix == ".cu" and kernels == 0
            return Result(source, architecture, kernels, "compiled, but holds no kernel" if empty else "")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def kernel_sources(csrc: Path) -> list[Path]:
    """Headers with device code and the binding sources, in a fixed order; csrc/ladder holds host programs."""
    return [*sorted(csrc.glob("include/**/*.cuh")), *sorted(csrc.glob("bindings/*.cu"))]


def run(csrc: Path, architectures: Sequence[str], jobs: int, optimise: bool) -> list[Result]:
    """Compile every source for every architecture; ``optimise`` for all of them, not for sm_90a alone.

    Raises
    ------
    GateError
        If NVRTC is unusable or there is nothing to compile.
    """
    sources = kernel_sources(csrc)
    if not sources:
        raise GateError(f"{csrc}: no .cuh or .cu files, expected include/ and bindings/ there")
    nvrtc = Nvrtc()
    tasks = [(source, architecture) for architecture in architectures for source in sources]

    def compile_one(task: tuple[Path, str]) -> Result:
        return nvrtc.compile(*task, csrc / "include", optimise or task[1] == OPTIMISED)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, tasks))


def report(results: Iterable[Result], csrc: Path, seconds: float) -> int:
    """Print failures and a one-line summary; return the exit status."""
    results = list(results)
    failures = [result for result in results if result.log]
    alike: dict[tuple[Path, str], list[str]] = {}
    for failure in failures:
        alike.setdefault((failure.source, failure.log), []).append(failure.architecture)
    for (source, log), architectures in alike.items():
        lines = log.splitlines()
        print(f"FAILED {source.relative_to(csrc)} for {', '.join(architectures)}:")
        print("\n".join(f"  {line}" for line in lines[:LOG_LINES]))
        if len(lines) > LOG_LINES:
            print(f"  ... {len(lines) - LOG_LINES} more lines")
    files = len({result.source for result in results})
    tried = dict.fromkeys(result.architecture for result in results)
    kernels = sum(result.kernels for result in results)
    verdict = f"{len(failures)} of {len(results)} compilations failed" if failures else "all compiled"
    print(f"NVRTC 12.8: {files} files for {', '.join(tried)}: {verdict}, {kernels} kernels in {seconds:.0f} s")
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--csrc", type=Path, default=CSRC, help="folder with include/ and bindings/ (default: ours)")
    parser.add_argument("--arch", action="append", help="sm_XX; repeat for several (default: all six of a release)")
    parser.add_argument("--optimise", action="store_true", help="compile all as a release is, not sm_90a alone")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilations at once")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        results = run(options.csrc, options.arch or ARCHITECTURES, options.jobs, options.optimise)
    except GateError as error:
        print(error, file=sys.stderr)
        return 2
    return report(results, options.csrc, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
