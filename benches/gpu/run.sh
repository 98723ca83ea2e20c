#!/usr/bin/env bash
# Everything a person with a GPU runs: the GPU tests, then the table. Needs python3 with PyTorch; builds nothing where
# target/release/libfolio.so and the test binary are there already (FOLIO_GPU_TESTS names the binary), else needs cargo.
#
#   benches/gpu/run.sh [output folder]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:-$root/target/bench-gpu}

if [ -n "${FOLIO_GPU_TESTS:-}" ]; then
    "$FOLIO_GPU_TESTS"
else
    (cd "$root" && cargo build --release --lib && cargo test --release --test cuda)
fi
python3 "$here/bench.py" "$out"
python3 "$here/models.py" "$out"
python3 "$here/mla.py" "$out/mla.jsonl"
python3 "$here/mla_drafts.py" "$out/mla_drafts.jsonl"
python3 "$here/mla_prefill.py" "$out/mla_prefill.jsonl"
python3 "$here/projections.py" "$out/projections.jsonl"
python3 "$here/cascade.py" "$out/cascade.jsonl"
python3 "$here/pages.py" "$out/pages.jsonl"
python3 "$here/steps.py" "$out/steps.jsonl"
python3 "$here/portable.py" >"$out/portable.jsonl"
echo "tables: $out/table.md and models.md, numbers: $out/*.jsonl; plot.py makes pictures of those in results/"
