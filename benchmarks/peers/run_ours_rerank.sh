#!/bin/bash
# `litchi train` on the rerank rows of a side-by-side bench; see run_ours.sh. BS counts groups here.
set -e
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
bin=$here/../../.venv/bin
"$bin/litchi" train "$here/rerank.yaml" model.path="$MODEL" data.train="$PEER_HOME/data/${DATA:-rerank.jsonl}" \
  train.steps="$STEPS" train.global_batch_size=$((BS * NPROC)) output="$BENCH_OUT/run" --procs "$NPROC" ${OURS:-}
"$bin/python" "$here/records.py" "$BENCH_OUT" $((BS * NPROC)) "${DOCUMENTS:-3}"
