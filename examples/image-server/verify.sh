#!/usr/bin/env bash
# Proves what setup.sh left: it draws one picture and compares it, byte for byte, with the one that is known.
set -euo pipefail
cd "$GPU_WORKSPACE/services/image-server"

wanted=fd3f9ae216bf98c7e4803afd93993c2ecfcb777d2320dbcf74145b8ac5d9d536
found=$(python3 picture.py "a lighthouse in fog" 7 64 64 4 | sha256sum | cut -d " " -f 1)
if [ "$found" != "$wanted" ]; then
  echo "the picture is another one: $found, wanted $wanted" >&2
  exit 1
fi
python3 server.py --help >/dev/null
echo "image-server draws what it should"
