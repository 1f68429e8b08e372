"""The tools around the kernels (NVRTC gate, ptxas report, GPU results): what passes, and above all what does not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
TOOLS = PACKAGE.parents[1] / "tools"

if not TOOLS.is_dir():
    pytest.skip("the repository's tools/ is not here", allow_module_level=True)


def load(name: str):
    """Import a tool by its path; dataclasses look their module up by name."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gate = load("nvrtc_gate")
ptxas_report = load("ptxas_report")
gpu_results = load("gpu_results")


@pytest.fixture
def nvrtc():
    try:
        return gate.Nvrtc()
    except gate.GateError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def csrc(tmp_path) -> Path:
    """A source tree with one good header and one good kernel, to be spoilt."""
    (tmp_path / "include").mkdir()
    (tmp_path / "bindings").mkdir()
    (tmp_path / "include" / "twice.cuh").write_text("__device__ inline float twice(float x) { return 2 * x; }\n")
    (tmp_path / "bindings" / "good.cu").write_text(
        '#include "twice.cuh"\nextern "C" __global__ void good(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }\n'
    )
    return tmp_path


def test_good_sources_pass(nvrtc, csrc, capsys):
    assert gate.main(["--csrc", str(csrc)]) == 0
    summary = capsys.readouterr().out.strip()
    assert summary.startswith("NVRTC 12.8: 2 files for sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120: all compiled, 6 ")
    assert "\n" not in summary


@pytest.mark.parametrize(("arguments", "plain"), [([], ["sm_80", "sm_89"]), (["--optimise"], [])])
def test_the_gate_optimises_one_architecture_unless_told_otherwise(monkeypatch, csrc, arguments, plain):
    """What takes NVRTC minutes is done once; with --optimise every architecture is compiled as a release is."""
    compiled = []

    class Recorder:
        def compile(self, source, architecture, include, optimise):
            compiled.append((architecture, optimise))
            return gate.Result(source, architecture, 1, "")

    monkeypatch.setattr(gate, "Nvrtc", Recorder)
    architectures = ["sm_80", "sm_89", "sm_90a"]
    chosen = [option for architecture in architectures for option in ("--arch", architecture)]
    assert gate.main(["--csrc", str(csrc), *chosen, *arguments]) == 0
    assert sorted(set(compiled)) == [(architecture, architecture not in plain) for architecture in architectures]


def test_the_gate_counts_kernels_not_functions(nvrtc, csrc, capsys):
    """Without optimisation device functions stay functions of their own: they are no kernels."""
    (csrc / "include" / "twice.cuh").write_text(
        "template <typename T> __device__ __noinline__ T twice(T x) { return 2 * x; }\n"
    )
    assert gate.main(["--csrc", str(csrc), "--arch", "sm_80", "--arch", "sm_90a"]) == 0
    assert "all compiled, 2 kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("bindings/good.cu", "__global__ void bad(float* x) { x[0] = undeclared; }", '"undeclared" is undefined'),
        ("bindings/good.cu", "#include <vector>\n__global__ void bad() {}", "source file"),
        ("bindings/good.cu", "// everything is behind a macro", "holds no kernel"),
        ("include/twice.cuh", "inline float host(float x) { return x; }", "host functions are not allowed"),
        ("include/other.cuh", "__device__ int64_t f() { return 0; }", '"int64_t"'),
    ],
)
def test_broken_sources_are_named_and_rejected(nvrtc, csrc, capsys, file, text, complaint):
    """What the gate is for: each failing file and architecture is named, the exit status is 1."""
    (csrc / file).write_text(text + "\n")
    assert gate.main(["--csrc", str(csrc), "--arch", "sm_80", "--arch", "sm_90a"]) == 1
    out = capsys.readouterr().out
    assert f"FAILED {file} for sm_80, sm_90a:" in out
    assert complaint in out
    assert "compilations failed" in out.splitlines()[-1]


def test_architecture_specific_code_fails_only_where_it_must(nvrtc, csrc, capsys):
    """wgmma is sm_90a's alone: unguarded it fails for the others, so a forgotten guard is caught before CUDA 12.8."""
    (csrc / "bindings" / "good.cu").write_text(
        'extern "C" __global__ void f() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    )
    assert gate.main(["--csrc", str(csrc)]) == 1
    failed = re.findall(r"^FAILED bindings/good\.cu for (.*):$", capsys.readouterr().out, re.MULTILINE)
    assert {architecture for line in failed for architecture in line.split(", ")} == {
        "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"
    }  # fmt: skip


def test_nothing_to_compile_is_no_pass(tmp_path, capsys):
    assert gate.main(["--csrc", str(tmp_path)]) == 2
    assert "no .cuh or .cu files" in capsys.readouterr().err


def test_every_kernel_source_is_covered():
    """A binding that the build compiles but the gate does not see would reach a CUDA 12.8 user untested."""
    units = re.search(r"set\(kernel_units\s([^)]*)\)", (PACKAGE / "CMakeLists.txt").read_text())
    assert units is not None
    built = {PACKAGE / word for word in units[1].split()}
    sources = set(gate.kernel_sources(PACKAGE / "csrc"))
    assert built == {source for source in sources if source.suffix == ".cu"}
    assert len([source for source in sources if source.suffix == ".cuh"]) >= 5


def test_our_rotary_kernels_compile(nvrtc, tmp_path, capsys):
    """One family for one architecture; `make check` runs the whole gate."""
    shutil.copytree(PACKAGE / "csrc" / "include", tmp_path / "include")
    (tmp_path / "bindings").mkdir()
    shutil.copy(PACKAGE / "csrc" / "bindings" / "rotary.cu", tmp_path / "bindings")
    assert gate.main(["--csrc", str(tmp_path), "--arch", "sm_90a"]) == 0
    assert (
        "19 kernels" in capsys.readouterr().out
    )  # 3 types x (2 layouts x aligned x 2 + 2 layouts x unaligned), and the planner of attention/plan.cuh


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'hot' for 'sm_90a'
ptxas info    : Function properties for hot
    {spills}
ptxas info    : Used 64 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compiling entry function 'cold' for 'sm_90a'
ptxas info    : Function properties for cold
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


@pytest.mark.parametrize(("stores", "loads", "status"), [(0, 0, 0), (8, 4, 1)])
def test_ptxas_report_names_kernels_that_spill(tmp_path, capsys, stores, loads, status):
    """Kernel rule "ptxas reports no spills in the hot kernels (recorded)"."""
    log, facts = tmp_path / "log", tmp_path / "facts.json"
    line = f"8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads"
    log.write_text(PTXAS.format(spills=line))
    assert ptxas_report.main([str(log), "--json", str(facts)]) == status
    assert ("spills 12 bytes: hot for sm_90a" in capsys.readouterr().out) == bool(status)
    recorded = json.loads(facts.read_text())
    assert (recorded["kernels"], recorded["most_registers"]) == (2, 64)
    assert [kernel["name"] for kernel in recorded["spilling"]] == (["hot"] if status else [])


def test_ptxas_report_wants_ptxas_output(tmp_path, capsys):
    (tmp_path / "log").write_text("[1/4] Building\n")
    assert ptxas_report.main([str(tmp_path / "log")]) == 2
    assert "no ptxas output" in capsys.readouterr().err


JUNIT = """\
<testsuites><testsuite>
  <testcase classname="a" name="good" time="1.25"/>
  {more}
  <testcase classname="a" name="absent" time="0"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>
"""
FAILED = '<testcase classname="a" name="bad" time="1"><failure message="no"/></testcase>'
BROKEN = '<testcase classname="a" name="broken" time="0"><error message="fixture"/></testcase>'


@pytest.mark.parametrize(
    ("more", "commands", "status"),
    [("", ["ladder=0"], 0), (FAILED, ["ladder=0"], 1), (BROKEN, ["ladder=0"], 1), ("", ["ladder=0", "x y=9"], 1)],
)
def test_gpu_results_record_and_judge(monkeypatch, tmp_path, more, commands, status):
    """tools/gpu_check.sh passes only if tests ran, none failed and every program came to a good end."""
    monkeypatch.setattr(gpu_results, "environment", lambda: {"card": "none"})
    (tmp_path / "junit.xml").write_text(JUNIT.format(more=more))
    arguments = [str(tmp_path / "new" / "test.json"), "--junit", str(tmp_path / "junit.xml")]
    assert gpu_results.main([*arguments, *(f"--command={command}" for command in commands)]) == status
    facts = json.loads((tmp_path / "new" / "test.json").read_text())
    assert (facts["name"], facts["environment"]) == ("test", {"card": "none"})
    assert facts["tests"]["passed"] == 1
    assert facts["tests"]["skipped"] == {"one GPU": 1}
    assert facts["tests"]["failed"] == [f"a::{name}" for name in ("bad", "broken") if f'"{name}"' in more]
    assert facts["commands"] == {command.rpartition("=")[0]: int(command[-1]) for command in commands}


def test_gpu_results_where_nothing_ran_are_no_pass(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_results, "environment", dict)
    (tmp_path / "junit.xml").write_text("<testsuites><testsuite/></testsuites>")
    assert gpu_results.main([str(tmp_path / "test.json"), "--junit", str(tmp_path / "junit.xml")]) == 1


@pytest.mark.skipif(shutil.which("timeout") is None, reason="gpu_check.sh wants GNU timeout")
def test_gpu_check_runs_every_ladder_program(tmp_path):
    """Row K14: a new family's program is built, run and sanitized without being listed; one that stops early is seen."""
    ladder = tmp_path / "packages" / "astrai-kernels" / "csrc" / "ladder"
    shutil.copytree(PACKAGE / "csrc" / "ladder", ladder)
    (ladder / "newest.cu").touch()
    (tmp_path / "build" / "gpu").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOLS / "gpu_check.sh", tmp_path / "tools")
    stand_ins = {
        "python": f'#!/bin/sh\ncase "$*" in *gpu_results*) echo "$*" >"{tmp_path}/results";; esac\n',
        "compute-sanitizer": '#!/bin/sh\ncase "$*" in *ladder_newest*) ;; *) echo all cases passed;; esac\n',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    environment["PYTHON"] = str(tmp_path / "python")
    subprocess.run([tmp_path / "tools" / "gpu_check.sh", "sanitize"], env=environment, check=True, capture_output=True)
    commands = re.findall(r"--command (\w+) ladder_(\w+)=(\d+)", (tmp_path / "results").read_text())
    assert sorted(commands) == sorted(
        (tool, file.stem, str(int(file.stem == "newest")))
        for tool in ("memcheck", "racecheck", "initcheck")
        for file in ladder.glob("*.cu")
    )
    assert len(commands) > 15
    built = re.search(r"file\(GLOB ladder_programs CONFIGURE_DEPENDS (\S+)\)", (PACKAGE / "CMakeLists.txt").read_text())
    assert built is not None
    assert {file.stem for file in PACKAGE.glob(built[1])} == {name for _, name, _ in commands} - {"newest"}
