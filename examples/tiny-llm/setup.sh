#!/usr/bin/env bash
# Puts the server where services live, in the workspace. Running it again brings the newest files and ends the same way.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || { echo "tiny-llm needs Python 3.8 or later" >&2; exit 1; }
place="$GPU_WORKSPACE/services/tiny-llm"
mkdir -p "$place"
for file in server.py model.py corpus.txt verify.sh; do
  cp "$file" "$place/.$file.new"
  mv -f "$place/.$file.new" "$place/$file"   # a server that starts meanwhile reads one whole file
done
echo "tiny-llm is in $place"
