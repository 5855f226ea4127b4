#!/usr/bin/env bash
# Build and run the native tests under the address and undefined-behaviour sanitizers. CC chooses the compiler.
#   tests/native/run.sh [rounds] [seed]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags=(-std=c11 -ffp-contract=off -g -O1 -Wall -Wextra -Werror -fno-omit-frame-pointer
       -fsanitize=address,undefined -fno-sanitize-recover=all -Inative/include -Inative/src)
mapfile -t sources < <(find native/src -name '*.c' | LC_ALL=C sort)
compile() { "${CC:-gcc}" "${flags[@]}" -c "$1" -o "$out/$(echo "$1" | tr / _).o"; }
for source in "${sources[@]}" tests/native/harness.c; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n; done
    compile "$source" &
done
while [ -n "$(jobs -rp)" ]; do wait -n; done
for name in test_known test_tiers test_update; do
    "${CC:-gcc}" "${flags[@]}" "tests/native/$name.c" "$out"/*.o -lm -o "$out/$name"
done
"$out/test_known"
"$out/test_tiers" "$@"
"$out/test_update" "$@"
