#!/usr/bin/env bash
# Gives the job's own copy a .venv with the pinned requirements. The environment itself lives in the workspace, which
# all jobs of a project share on a machine, and is named by what is in it: the second job finds it, a job with other
# pins gets another one and takes nothing away from those that run.
set -euo pipefail

key=$(python3 - <<'EOF'
import hashlib, sys
content = open("requirements.txt", "rb").read() + (sys.version + sys.base_prefix).encode()
print(hashlib.sha256(content).hexdigest()[:16])
EOF
)
environment="$GPU_WORKSPACE/environments/train-charlm-$key"

if [ ! -d "$environment" ]; then
  # Built under a name of its own and then renamed, so that a killed setup leaves nothing that looks finished and two
  # jobs that start at once do not meet: the second rename fails and its copy is dropped.
  building="$environment.building-${GPU_JOB_ID:-$$}"
  trap 'rm -rf "$building"' EXIT
  mkdir -p "$GPU_WORKSPACE/environments"
  python3 -m venv --clear "$building"
  "$building/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: -r requirements.txt
  python3 -c 'import os, sys; os.rename(*sys.argv[1:])' "$building" "$environment" 2>/dev/null || [ -d "$environment" ]
  echo "made $(basename "$environment")"
fi
ln -sfn "$environment" .venv
