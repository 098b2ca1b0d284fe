#!/usr/bin/env bash
# The packaged base from nothing, in order. About a quarter of an hour on two cores.
#   recipes/tiny_base/make.sh FULL_TOKENIZER_FOLDER WORK_FOLDER
# FULL_TOKENIZER_FOLDER: tokenizer.json of Qwen2.5, or dashscope/resources of PyPI's dashscope.
set -euo pipefail
full=$1 work=$2 here=$(dirname "$0")
python "$here/tokenizer.py" --full "$full" --out "$work/processor"
python "$here/init_model.py" --processor "$work/processor" --out "$work/init"
python "$here/align.py" --model "$work/init" --out "$work/aligned"
python "$here/make_data.py" --out "$work/data" --rows 80000 --draws 40
litchi train "$here/chat.yaml" model.path="$work/aligned" data.train="$work/data/chat.jsonl" \
  data.eval="$work/data/chat-validation.jsonl" output="$work/chat" --procs 2
python "$here/pack.py" --export "$work/chat/export" --out src/litchi/builtin/tiny
