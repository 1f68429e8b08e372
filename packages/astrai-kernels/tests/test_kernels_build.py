"""The build: version labels, what the module links, how many compilations, warnings; and launching without a driver."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[1]
CMAKE = shutil.which("cmake")


def load(path: Path):
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestLabel:
    """Rows B3 and the +cu128/+cu130 labels, which enter the metadata at build time."""

    provider = load(PACKAGE / "build_support" / "astrai_version.py")

    @pytest.mark.parametrize(
        ("label", "suffix"), [("", ""), ("cu128", "+cu128"), ("cu130", "+cu130"), (" cu130\n", "+cu130")]
    )
    def test_version_from_file_and_environment(self, monkeypatch, tmp_path, label, suffix):
        version_file = tmp_path / "_version.py"
        version_file.write_text('__version__ = "3.1.4"\n')
        monkeypatch.setattr(self.provider, "VERSION_FILE", version_file)
        monkeypatch.setenv("ASTRAI_CUDA_LABEL", label)
        assert self.provider.dynamic_metadata("version", {}) == "3.1.4" + suffix

    @pytest.mark.parametrize("label", ["12.8", "cu12", "cu128.local", "rocm64"])
    def test_other_labels_are_refused(self, label):
        with pytest.raises(ValueError, match=f"ASTRAI_CUDA_LABEL='{label}'"):
            self.provider.labelled_version("0.1.0", label)

    @pytest.mark.parametrize("label", ["cu128", "cu130"])
    def test_metadata_of_the_wheel(self, tmp_path, label):
        """The build backend itself writes the label into METADATA; nothing is renamed."""
        if not self.provider.VERSION_FILE.is_file():
            pytest.skip("the source tree is not here")
        pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
        code = f"from scikit_build_core.build import *; prepare_metadata_for_build_wheel({str(tmp_path)!r})"
        environment = {**os.environ, "ASTRAI_CUDA_LABEL": label}
        subprocess.run([sys.executable, "-c", code], cwd=PACKAGE, env=environment, check=True, capture_output=True)
        [metadata] = tmp_path.glob("*.dist-info/METADATA")
        lines = metadata.read_text().splitlines()
        assert f"Version: {load(self.provider.VERSION_FILE).__version__}+{label}" in lines
        assert [line for line in lines if line.startswith("Requires-Dist") and "extra" not in line] == [
            "Requires-Dist: torch>=2.9"
        ]


def cmake(tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run CMake code after the functions of cmake/toolkit.cmake."""
    if CMAKE is None:
        pytest.skip("cmake is not installed")
    script = tmp_path / "script.cmake"
    script.write_text(f'include("{PACKAGE}/cmake/toolkit.cmake")\n{code}\n')
    return subprocess.run(
        [CMAKE, "-P", str(script)], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


class TestCMake:
    """The functions around the toolkit, run by CMake itself in script mode."""

    @pytest.mark.parametrize(("wanted", "expected"), [("1", 1), ("100000", os.cpu_count())])
    def test_build_parallel_is_capped_by_the_cores(self, tmp_path, wanted, expected):
        """Row B1."""
        done = cmake(tmp_path, "astrai_build_parallel(n)\nmessage(STATUS n=${n})", BUILD_PARALLEL=wanted)
        assert f"n={expected}" in done.stdout

    def test_build_parallel_must_be_a_number(self, tmp_path):
        done = cmake(tmp_path, "astrai_build_parallel(n)", BUILD_PARALLEL="many")
        assert done.returncode != 0
        assert "BUILD_PARALLEL=many: expected a positive integer" in done.stderr

    @pytest.mark.parametrize(
        ("architectures", "expected"),
        [
            (
                "80-real;86-real;89-real;90a-real;100-real;120",
                [
                    "80,code=[sm_80,sm_86]",
                    "89,code=[sm_89]",
                    "90a,code=[sm_90a]",
                    "100,code=[sm_100,sm_120,compute_100]",
                ],
            ),
            ("90a-real", ["90a,code=[sm_90a]"]),
            ("90-real;90a-real", ["90,code=[sm_90]", "90a,code=[sm_90a]"]),
            ("87;86-virtual", ["80,code=[sm_87,compute_80]"]),
            ("120-real;103f-real", ["100,code=[sm_120]", "103f,code=[sm_103f]"]),
        ],
    )
    def test_architectures_share_front_ends(self, tmp_path, architectures, expected):
        """B1: every architecture that was asked for gets machine code, PTX or both, from the nearest PTX that it can run."""
        code = f'astrai_generate_code(flags "80;89;90;100" "{architectures}")\nmessage(STATUS "${{flags}}")'
        done = cmake(tmp_path, code)
        assert done.returncode == 0, done.stderr
        flags = done.stdout.strip().removeprefix("-- ").split(";")
        assert flags == [f"--generate-code=arch=compute_{flag}" for flag in expected]

    @pytest.mark.parametrize(
        ("architecture", "complaint"),
        [
            ("75-real", "the kernels need 80 or later"),
            ("native", "expected names such as 86-real"),
            ("sm_90a", "expected names such as 86-real"),
        ],
    )
    def test_architectures_that_cannot_be_built_are_refused(self, tmp_path, architecture, complaint):
        done = cmake(tmp_path, f'astrai_generate_code(flags "80;89;90;100" "90a-real;{architecture}")')
        assert done.returncode != 0
        assert f"CUDA architecture {architecture}: {complaint}" in " ".join(done.stderr.split())

    def test_a_front_end_for_every_architecture_that_sources_ask_for(self):
        """Sharing PTX changes nothing only while no __CUDA_ARCH__ condition lies between two of the front ends."""
        if not (PACKAGE / "csrc").is_dir():
            pytest.skip("the source tree is not here")
        [front_ends] = re.findall(r'astrai_generate_code\(\w+ "([\d;]+)"', (PACKAGE / "CMakeLists.txt").read_text())
        allowed = {")", *(f">= {front_end}0" for front_end in front_ends.split(";"))}  # ")" is that of defined()
        files = [path for path in (PACKAGE / "csrc").rglob("*") if path.suffix in {".cu", ".cuh", ".h"}]
        uses = {use.strip() for path in files for use in re.findall(r"__CUDA_ARCH__(\)|[^\n)|&]*)", path.read_text())}
        assert {")", ">= 900"} <= uses <= allowed

    @pytest.mark.parametrize(
        ("nvcc", "option"),
        [
            ("12.8.93", "-Xfatbin=-compress-all"),
            ("12.9.1", "-Xfatbin=-compress-all"),
            ("13.0.88", "--compress-mode=size"),
        ],
    )
    def test_machine_code_is_compressed_for_every_driver_that_loads_it(self, tmp_path, nvcc, option):
        """A wheel of CUDA 12.x must load with drivers of 12.0, which do not know zstd."""
        done = cmake(tmp_path, f'astrai_compression(flag "{nvcc}")\nmessage(STATUS "${{flag}}")')
        assert done.stdout.strip() == f"-- {option}"

    @pytest.mark.parametrize(
        ("version", "nvcc", "good"),
        [
            ("0.1.0", "13.0.88", True),
            ("0.1.0+cu130", "13.0.88", True),
            ("0.1.0+cu128", "12.8.93", True),
            ("0.1.0+cu128", "13.0.88", False),
            ("0.1.0+cu130", "13.1.2", False),
        ],
    )
    def test_label_must_fit_the_compiler(self, tmp_path, version, nvcc, good):
        """A wheel labelled +cu128 whose code came from nvcc 13 would never be noticed later."""
        done = cmake(tmp_path, f'astrai_check_label("{version}" "{nvcc}")')
        assert (done.returncode == 0) == good, done.stderr
        assert good or f"nvcc is {nvcc}" in " ".join(done.stderr.split())

    @pytest.mark.parametrize(
        ("torch_cuda", "warns"), [("'12.8'", True), ("'13.0'", False), ("'13.1'", False), ("None", False)]
    )
    def test_warning_when_torch_is_built_for_another_cuda(self, tmp_path, torch_cuda, warns):
        """Row B3: only the major version matters, torch is not imported, and a CPU torch is no mismatch."""
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / "torch" / "version.py").write_text(f"cuda = {torch_cuda}\n")
        done = cmake(tmp_path, f'astrai_warn_torch_mismatch("{sys.executable}" "13.0.88")', PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert ("installed torch is built for CUDA" in " ".join(done.stderr.split())) == warns

    def test_no_torch_is_no_problem(self, tmp_path):
        """Row B3: torch is not needed at build time."""
        isolated = tmp_path / "python"
        isolated.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        isolated.chmod(0o755)
        done = cmake(tmp_path, f'astrai_warn_torch_mismatch("{isolated}" "13.0.88")')
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.kernel
def test_the_module_links_neither_torch_nor_the_cuda_runtime():
    """Decision "no libtorch in C++": static cudart, and nothing else that a machine without CUDA lacks."""
    if shutil.which("ldd") is None:
        pytest.skip("ldd is not installed")
    path = importlib.util.find_spec("astrai_kernels.lib._C").origin
    linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].partition(".so")[0].rpartition("/")[2] for line in linked.splitlines()}
    allowed = {"linux-vdso", "libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert names <= allowed | {"libdl", "librt", "libpthread"}, linked


@pytest.mark.kernel
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the launch would succeed")
@pytest.mark.parametrize(
    "op",
    ["rms_norm", "add_rms_norm", "rotary", "qkv_norm_rope_write", "gated_activation", "embedding", "argmax", "sample"],
)
def test_a_launch_without_a_driver_is_an_error_not_a_crash(op):
    """A kernel never falls back: without a GPU the launch itself says what CUDA said."""
    from astrai_kernels.lib import _C

    rows, heads = (16, 8, 0), (16, 16, 64, 64, 64, 64, 1)
    row, none = (16, 8), (0, 0)
    pools, tables = ((16, 64, 64),) * 3, (row, row, 4, row, True, row, True)
    columns = [row, none, none, none, row, row]
    calls = {
        "qkv_norm_rope_write": lambda: _C.qkv_norm_rope_write(
            *(0, 0, 0, (16, 192), *pools, none, none, 0, 0, *tables, 9, 1, 1, 1, 64, 64, 1e-6, False, False)
        ),
        "gated_activation": lambda: _C.gated_activation(0, 0, 0, 0, rows, rows, 1, 1, 8),
        "embedding": lambda: _C.embedding(0, 0, 0, row, True, row, row, (0, 0, 0), 1, 4, 8),
        "argmax": lambda: _C.sample(0, 0, 0, row, row, 1, 8, [none] * 6, [none] * 3, none, none),
        "sample": lambda: _C.sample(0, 0, 0, row, row, 1, 8, columns, [none] * 3, none, none),
        "rms_norm": lambda: _C.rms_norm(0, 0, 0, rows, 16, rows, 1, 1, 8, 1e-6),
        "add_rms_norm": lambda: _C.add_rms_norm(0, 0, 0, rows, rows, 16, rows, rows, 1, 1, 8, 1e-6, True),
        "rotary": lambda: _C.rotary(0, 0, 0, heads, heads, 16, 32, 16, 32, 4, 16, 1, True, 1, 64, 64, False),
    }
    with pytest.raises(RuntimeError, match=rf"astrai_kernels.{op}: .*\(cudaError(InsufficientDriver|NoDevice)\)"):
        calls[op]()


@pytest.mark.kernel
def test_the_module_checks_what_python_might_get_wrong():
    """Last line of defence: bad numbers are a ValueError before anything reaches CUDA; empty batches do nothing."""
    from astrai_kernels.lib import _C

    rows, heads = (16, 8, 0), (16, 16, 64, 64, 64, 64, 1)
    with pytest.raises(ValueError, match="dtype must be 0"):
        _C.rms_norm(3, 0, 0, rows, 16, rows, 1, 1, 8, 1e-6)
    with pytest.raises(ValueError, match="rows must not be negative"):
        _C.rms_norm(0, 0, 0, rows, 16, rows, -1, 1, 8, 1e-6)
    with pytest.raises(ValueError, match="must not be null"):
        _C.rms_norm(0, 0, 0, (0, 8, 0), 16, rows, 1, 1, 8, 1e-6)
    with pytest.raises(ValueError, match="multiple of the element size"):
        _C.rms_norm(0, 0, 0, (18, 8, 0), 16, rows, 1, 1, 8, 1e-6)
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        _C.rotary(0, 0, 0, heads, heads, 16, 32, 16, 32, 4, 16, 1, True, 1, 64, 66, False)
    none = (0, 0)
    with pytest.raises(ValueError, match="kind must be 0"):
        _C.gated_activation(0, 3, 0, 0, rows, rows, 1, 1, 8)
    with pytest.raises(ValueError, match="vocab must lie between 1 and 2"):
        _C.sample(0, 0, 0, none, none, 1, 0, [none] * 6, [none] * 3, none, none)
    with pytest.raises(ValueError, match="seed and position must not be null"):
        _C.sample(0, 0, 0, (16, 8), (16, 1), 1, 8, [(16, 1)] + [none] * 5, [none] * 3, none, none)
    with pytest.raises(ValueError, match="must all be given or all be null"):
        _C.sample(0, 0, 0, (16, 8), (16, 1), 1, 8, [none] * 6, [none] * 3, (16, 8), none)
    with pytest.raises(ValueError, match="next_norm takes bfloat16, hidden a multiple of 64"):
        _C.embedding(1, 0, 0, (16, 1), True, (16, 64), (16, 64), (16, 16, 16), 1, 4, 64)
    with pytest.raises(ValueError, match="next_norm wants table, out and the halves' memory"):
        _C.embedding(2, 0, 0, (16, 1), True, (16, 64), (16, 64), (16, 0, 16), 1, 4, 64)
    assert _C.embedding(0, 0, 0, none, True, none, none, (0, 0, 0), 0, 4, 8) is None
    assert _C.rms_norm(0, 0, 0, rows, 16, rows, 0, 1, 8, 1e-6) is None
    assert _C.rotary(0, 0, 0, heads, heads, 16, 32, 16, 32, 4, 16, 1, True, 0, 64, 64, False) is None
