#!/usr/bin/env bash
# Check the kernels on a machine with a Hopper card (H100, H200). No network is used.
#
#   tools/gpu_check.sh build         compile for sm_90a, from source; report registers and spills
#   tools/gpu_check.sh test          pytest -m gpu over the repository, then the ladder programs
#   tools/gpu_check.sh sanitize      the ladder's small cases under memcheck, racecheck and initcheck
#   tools/gpu_check.sh bench NAME    benchmarks/NAME.py, for example: bench kernels; its options follow
#   tools/gpu_check.sh two           on two GPUs: the tests of several ranks, by NCCL, and training on one and on two, with a
#                                    verdict on each in two_gpus.json; runs without the kernels, so `build` may be left out
#
# Needed: nvcc, cmake, and a Python with torch (CUDA), pybind11, scikit-build-core and pytest.
# Environment:
#   OUT                 folder for the JSON results and logs (default ./gpu_out)
#   PYTHON              interpreter (default python3)
#   CUDAARCHS           architectures to compile (default 90a-real)
#   ASTRAI_EXTRA_SITE   a folder of further Python packages, for what this machine's Python lacks
#   ASTRAI_COMMIT       commit to record where the tree came without its git folder
#   ASTRAI_TEST_WORKERS processes that run the tests, where pytest-xdist is there (default 8): most of their time is the host's
#   ASTRAI_PHASE_LIMIT  seconds that a phase's long commands may take (default 470); of `two` all together, about
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'gpu_check: %s\n' "$*" >&2
  exit 1
}

case ${1:-}/$# in
  build/1 | test/1 | sanitize/1 | two/1 | bench/[2-9]) ;;
  *) die "usage: $0 build | test | sanitize | two | bench NAME [OPTION...]" ;;
esac

PYTHON=${PYTHON:-python3}
OUT=$(mkdir -p "${OUT:-gpu_out}" && cd "${OUT:-gpu_out}" && pwd)
WORK=$PWD/build/gpu
SITE=$WORK/site
LIMIT=(timeout --kill-after=10 "${ASTRAI_PHASE_LIMIT:-470}")
# A program for each file, as in CMakeLists.txt.
FAMILIES=(packages/astrai-kernels/csrc/ladder/*.cu)
FAMILIES=("${FAMILIES[@]##*/}")
FAMILIES=("${FAMILIES[@]%.cu}")
export CUDAARCHS=${CUDAARCHS:-90a-real}
export PYTHONUNBUFFERED=1
# The compiled kernels, then the sources of the others; not the kernels' own source tree, which holds no compiled module.
PYTHONPATH=$SITE:$PWD:$PWD/packages/astrai-core/src:$PWD/packages/astrai-infer/src
PYTHONPATH+=:$PWD/packages/astrai-train/src:$PWD/packages/astrai-cli/src${ASTRAI_EXTRA_SITE:+:$ASTRAI_EXTRA_SITE}

say() { printf '\n== %s\n' "$*"; }

need() {
  command -v "$1" >/dev/null || die "$1 is not on PATH"
}

# Everything below would skip or mislead without these two; so they are checked first.
need_gpu_and_kernels() {
  PYTHONPATH=$PYTHONPATH "$PYTHON" - "$SITE" <<'PY' || die "needed: a GPU that torch sees, and the kernels that '$0 build' makes"
import sys
import torch
import astrai_kernels

assert astrai_kernels.__file__.startswith(sys.argv[1]), f"{astrai_kernels.__file__} hides the build in {sys.argv[1]}"
assert torch.cuda.is_available(), "torch sees no CUDA device"
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {astrai_kernels.build_info()}")
PY
}

build() {
  need nvcc
  need cmake
  say "build: astrai-kernels for $CUDAARCHS"
  # A fresh folder: ptxas reports only what it compiles now.
  rm -rf "$WORK"
  mkdir -p "$WORK"
  "${LIMIT[@]}" "$PYTHON" - "$WORK" >"$OUT/build.log" 2>&1 <<'PY' ||
import os, sys, zipfile
from scikit_build_core.build import build_wheel  # the build backend itself: pip may be missing, or want a network

work = sys.argv[1]
os.chdir("packages/astrai-kernels")
wheel = build_wheel(work, {"build-dir": f"{work}/{{wheel_tag}}", "cmake.define.ASTRAI_PTXAS_VERBOSE": "ON"})
zipfile.ZipFile(os.path.join(work, wheel)).extractall(os.path.join(work, "site"))
PY
    { tail -n 40 "$OUT/build.log"; die "the build failed; the whole log is $OUT/build.log"; }
  grep -iE 'warning|CUDA architectures|Compilations at once' "$OUT/build.log" || true
  local status=0
  "$PYTHON" tools/ptxas_report.py "$OUT/build.log" --json "$OUT/ptxas.json" || status=$?

  say "build: ladder programs"
  cmake -S packages/astrai-kernels -B "$WORK/ladder" -DASTRAI_BUILD_EXTENSION=OFF -DASTRAI_BUILD_LADDER=ON \
    -DASTRAI_LINE_INFO=ON -DCMAKE_BUILD_TYPE=Release >"$WORK/ladder.log" 2>&1 || { cat "$WORK/ladder.log"; die "cmake failed"; }
  "${LIMIT[@]}" cmake --build "$WORK/ladder" --parallel >>"$WORK/ladder.log" 2>&1 ||
    { tail -n 40 "$WORK/ladder.log"; die "the ladder build failed"; }
  need_gpu_and_kernels
  ((status == 0)) || die "kernels spill registers (named above)"
}

run_tests() {
  need_gpu_and_kernels
  say "test: pytest -m gpu"
  # Only files with GPU tests: the others may need packages that a GPU machine does not have.
  local files
  mapfile -t files < <(grep -rlE 'mark\.gpu|skip_no_cuda' --include='test_*.py' packages/*/tests tests)
  ((${#files[@]})) || die "no test file has GPU tests"
  rm -f "$WORK/test.xml"
  local status=0 family workers=()
  if PYTHONPATH=$PYTHONPATH "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n "${ASTRAI_TEST_WORKERS:-8}"); fi
  # A line for each test as it ends: a run that its limit cuts short has named its failures.
  PYTHONPATH=$PYTHONPATH "${LIMIT[@]}" "$PYTHON" -m pytest -m gpu "${workers[@]}" -v -p no:cacheprovider --durations=5 \
    --tb=short -rfE --junitxml="$WORK/test.xml" "${files[@]}" >"$OUT/test.log" 2>&1 || status=$?
  grep -aE 'FAILED|ERROR|^E  |^=+ .*(passed|failed|error)' "$OUT/test.log" | sort -u | head -n 60 || true
  printf 'pytest: status %d, %d passed\n' "$status" "$(grep -ac PASSED "$OUT/test.log" || true)"
  local results=(--command "pytest=$status")
  [[ -f $WORK/test.xml ]] && results+=(--junit "$WORK/test.xml")
  for family in "${FAMILIES[@]}"; do
    say "test: ladder_$family"
    status=0
    "${LIMIT[@]}" "$WORK/ladder/ladder_$family" >"$WORK/ladder_$family.txt" 2>&1 || status=$?
    grep -E 'FAILED|GB/s|passed|cuda' "$WORK/ladder_$family.txt" || true
    results+=(--command "ladder_$family=$status")
  done
  cat "$WORK"/ladder_*.txt >>"$OUT/test.log"
  PYTHONPATH=$PYTHONPATH "$PYTHON" -m tools.gpu_results "$OUT/test.json" "${results[@]}" || die "tests failed"
}

sanitize() {
  need_gpu_and_kernels
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer") ||
    die "compute-sanitizer is not on PATH"
  local results=() tool family status
  : >"$OUT/sanitize.log"
  for tool in memcheck racecheck initcheck; do
    for family in "${FAMILIES[@]}"; do
      say "sanitize: $tool ladder_$family"
      status=0
      "${LIMIT[@]}" "$sanitizer" --tool "$tool" --error-exitcode 9 "$WORK/ladder/ladder_$family" --quick \
        >"$WORK/sanitize.txt" 2>&1 || status=$?
      # The program must have come to its end too, whatever the sanitizer makes of its exit status.
      grep -q 'all cases passed' "$WORK/sanitize.txt" || ((status)) || status=1
      grep -E 'FAILED|passed|ERROR SUMMARY|RACECHECK SUMMARY|Error:' "$WORK/sanitize.txt" | head -n 20 || true
      printf '\n== %s ladder_%s: status %d\n' "$tool" "$family" "$status" >>"$OUT/sanitize.log"
      grep -vE ' ok$' "$WORK/sanitize.txt" | head -n 200 >>"$OUT/sanitize.log" || true
      results+=(--command "$tool ladder_$family=$status")
    done
  done
  PYTHONPATH=$PYTHONPATH "$PYTHON" -m tools.gpu_results "$OUT/sanitize.json" "${results[@]}" || die "not clean"
}

bench() {
  local name=$1
  shift
  [[ -f benchmarks/$name.py ]] || die "benchmarks/$name.py does not exist"
  need_gpu_and_kernels
  say "bench: $name"
  PYTHONPATH=$PYTHONPATH "${LIMIT[@]}" "$PYTHON" -m "benchmarks.$name" --out "$OUT" "$@"
}

two() {
  PYTHONPATH=$PYTHONPATH "$PYTHON" -c 'import torch; raise SystemExit(torch.cuda.device_count() < 2)' ||
    die "needed: two GPUs that torch sees"
  say "two: tests of several ranks"
  mkdir -p "$WORK"
  rm -f "$WORK/two.xml"
  local files=(packages/astrai-train/tests/test_train_{parallel,sharded_optimizers,killed_rank,launch,world}.py)
  [[ -d $SITE ]] && files+=(packages/astrai-kernels/tests/test_kernels_gpu_torch.py)
  local limit=${ASTRAI_PHASE_LIMIT:-470} status=0 workers=()
  # They spend their time starting processes; a worker takes whole files, whose ranks then start once.
  if PYTHONPATH=$PYTHONPATH "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n "${#files[@]}" --dist loadfile); fi
  # By SIGINT, after which pytest with workers still writes down what had come to its end.
  PYTHONPATH=$PYTHONPATH timeout --signal=INT --kill-after=30 $((limit / 2)) "$PYTHON" -m pytest -m gpu "${workers[@]}" -v -p no:cacheprovider \
    --durations=5 --tb=short -rfE --junitxml="$WORK/two.xml" "${files[@]}" >"$OUT/two.log" 2>&1 || status=$?
  grep -aE 'FAILED|ERROR|^E  |^=+ .*(passed|failed|error)' "$OUT/two.log" | sort -u | head -n 60 || true
  printf 'pytest: status %d, %d passed\n' "$status" "$(grep -ac PASSED "$OUT/two.log" || true)"

  say "two: training"
  local left=$((limit - SECONDS + started))
  PYTHONPATH=$PYTHONPATH timeout --kill-after=10 $((left + 60)) "$PYTHON" -m benchmarks.two_gpus --out "$OUT" --budget "$left" \
    --junit "$WORK/two.xml" || die "not all is as asked for; $OUT/two_gpus.json says what"
  ((status == 0)) || die "tests failed, or did not come to their end"
}

started=$SECONDS
case $1 in
  build) build ;;
  test) run_tests ;;
  sanitize) sanitize ;;
  two) two ;;
  bench) bench "${@:2}" ;;
esac
say "$* done in $((SECONDS - started)) s; results in $OUT"
