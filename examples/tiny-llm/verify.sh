#!/usr/bin/env bash
# Proves what setup.sh left: the model learns its text and says, letter by letter, what it is known to say.
set -euo pipefail
cd "$GPU_WORKSPACE/services/tiny-llm"

wanted=97982e1af2444dc7ce5c35c28d31244022977a1a3d3bc412d8d0d50d8a9184ba
found=$(python3 -c '
from model import Model
model = Model(open("corpus.txt", encoding="utf-8").read())
print("".join(model.go_on("The lighthouse ", 60, temperature=0)))
' | sha256sum | cut -d " " -f 1)
if [ "$found" != "$wanted" ]; then
  echo "the model says something else: $found, wanted $wanted" >&2
  exit 1
fi
python3 server.py --help >/dev/null
echo "tiny-llm says what it should"
