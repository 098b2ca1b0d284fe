#!/usr/bin/env bash
# The packaged base from nothing, in order. About half an hour on two cores.
#   recipes/tiny_base/make.sh FULL_TOKENIZER_FOLDER WORK_FOLDER
# FULL_TOKENIZER_FOLDER: tokenizer.json of Qwen2.5, or dashscope/resources of PyPI's dashscope.
set -euo pipefail
full=$1 work=$2 here=$(dirname "$0")
python "$here/tokenizer.py" --full "$full" --out "$work/processor"
python "$here/init_model.py" --processor "$work/processor" --out "$work/init"
python "$here/make_data.py" --out "$work/data" --stage words --rows 30000 --draws 50
python "$here/make_data.py" --out "$work/data" --rows 30000 --draws 40
litchi train "$here/words.yaml" model.path="$work/init" data.train="$work/data/words.jsonl" \
  data.eval="$work/data/words-validation.jsonl" output="$work/words" --procs 2
litchi train "$here/chat.yaml" model.path="$work/words/export" data.train="$work/data/chat.jsonl" \
  data.eval="$work/data/chat-validation.jsonl" output="$work/chat" --procs 2
python "$here/pack.py" --export "$work/chat/export" --out src/litchi/builtin/tiny
