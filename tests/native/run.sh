#!/usr/bin/env bash
# Build and run the native tests.
#   tests/native/run.sh [sanitize] [rounds] [seed]   under the address and undefined-behaviour sanitizers; CC chooses the compiler
#   tests/native/run.sh threads                      kernels of several threads at once under the thread sanitizer
#   tests/native/run.sh fuzz SECONDS [CORPUS]        the same built by clang, then test_tiers with cases that libFuzzer chooses; from
#                                                    tests/native/corpus.txt on, new ones into the folder CORPUS, where one that fails stays
#   tests/native/run.sh avx512 [rounds] [seed]       the kernels for AVX-512 on a processor with AVX2, their instructions replaced by
#                                                    SIMDe's (Debian: apt-get install libsimde-dev)
#   tests/native/run.sh aarch64 [rounds] [seed]      for aarch64 under qemu; undefined behaviour traps. CC_AARCH64 chooses the
#                                                    compiler: "python3 -m ziglang cc -target aarch64-linux-musl" does, too
set -euo pipefail
cd "$(dirname "$0")/../.."
leg=sanitize
case ${1:-} in sanitize | threads | fuzz | avx512 | aarch64) leg=$1 && shift ;; esac
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags=(-std=c11 -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror -Inative/include -Inative/src -DGC_ALWAYS_INLINE=)
tests=(test_known test_tiers test_update test_rotate test_moments)
runner=()
if [ "$leg" = sanitize ]; then
    compiler=${CC:-gcc}
    flags+=(-g1 -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
elif [ "$leg" = threads ]; then
    compiler=${CC:-gcc}
    flags+=(-g1 -O0 -D_POSIX_C_SOURCE=200809L -fsanitize=thread -pthread)
    tests=(test_threads)
elif [ "$leg" = fuzz ]; then
    compiler=${CC:-clang}
    command -v "$compiler" >/dev/null || { echo 'fuzzing needs clang (Debian: apt-get install clang libclang-rt-dev)' >&2; exit 1; }
    flags+=(-g1 -O1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
elif [ "$leg" = avx512 ]; then
    compiler=${CC:-gcc}
    flags+=(-O2 -DGC_EMULATE_AVX512 -Itests/native -mavx2 -mfma -mf16c -mbmi2 -Wno-psabi)
else
    compiler=${CC_AARCH64:-aarch64-linux-gnu-gcc}
    flags+=(-O2 -static -fsanitize=undefined -fsanitize-undefined-trap-on-error)
    runner=("${QEMU_AARCH64:-qemu-aarch64}")
fi
mapfile -t sources < <(find native/src -name '*.c' | LC_ALL=C sort)
compile() { $compiler "${flags[@]}" -c "$1" -o "$out/$(echo "$1" | tr / _).o"; }
for source in "${sources[@]}" tests/native/harness.c; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n; done
    compile "$source" &
done
while [ -n "$(jobs -rp)" ]; do wait -n; done
for name in "${tests[@]}"; do
    $compiler "${flags[@]}" "tests/native/$name.c" "$out"/*.o -lm -o "$out/$name"
done
if [ "$leg" = threads ]; then
    "$out/test_threads"
    exit
elif [ "$leg" = fuzz ]; then
    seconds=$1 corpus=${2:-$out/corpus}
    set --
fi
tiers=("$@") update=("$@")
if (($# == 0)); then
    update=(1)  # a minute, under qemu too
    if [ "$leg" != sanitize ]; then tiers=(4); fi  # libFuzzer has more of them
fi
"${runner[@]}" "$out/test_known"
"${runner[@]}" "$out/test_tiers" "${tiers[@]}"
"${runner[@]}" "$out/test_moments"
"${runner[@]}" "$out/test_rotate" "$@"
"${runner[@]}" "$out/test_update" "${update[@]}"
if [ "$leg" = fuzz ]; then
    mkdir -p "$corpus" "$out/known"
    python3 tests/native/corpus.py unpack "$out/known"
    $compiler "${flags[@]}" -fsanitize=fuzzer tests/native/fuzz_kernels.c "$out"/*.o -lm -o "$out/fuzz_kernels"
    "$out/fuzz_kernels" -max_total_time="$seconds" -max_len=4096 -timeout=60 -print_final_stats=1 \
        -artifact_prefix="$corpus/failed-" "$corpus" "$out/known"
fi
