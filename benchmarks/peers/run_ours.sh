#!/bin/bash
# `litchi train` on the chat rows of a side-by-side bench, as its runner calls it: STEPS, BS, NPROC, MODEL, PEER_HOME and
# BENCH_OUT in the environment. One plain call with every guarantee on; then its metrics.jsonl in the bench's form.
set -e
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
bin=$here/../../.venv/bin
"$bin/litchi" train "$here/chat.yaml" model.path="$MODEL" data.train="$PEER_HOME/data/${DATA:-tagged.jsonl}" \
  train.steps="$STEPS" train.global_batch_size=$((BS * NPROC)) output="$BENCH_OUT/run" --procs "$NPROC" ${OURS:-}
"$bin/python" "$here/records.py" "$BENCH_OUT" $((BS * NPROC))
