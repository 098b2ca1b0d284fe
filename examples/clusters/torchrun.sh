#!/bin/bash
# The same command on each of two machines; only the number differs. /data is on both.
#   NODE_RANK=0 bash examples/clusters/torchrun.sh      NODE_RANK=1 MASTER=first-machine bash examples/clusters/torchrun.sh
set -euo pipefail
torchrun --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node gpu \
  --master-addr "${MASTER:-$(hostname)}" --master-port 29400 \
  -m litchi train configs/rerank-lychee.yaml model.path=/data/lychee data.train=/data/train.jsonl \
  output=/data/runs/rerank
