#!/bin/sh
# Environments of their own for the peers that the training benchmark compares with: setup.sh FOLDER [NAME ...]
# (torchrun comes with torch and needs none). The versions are pinned so that the figures can be repeated.
set -e
folder=$1
shift
for name in "${@:-}"; do
  case "$name" in
    torchft) wants="torchft-nightly==2026.10.26" ;;
    dlrover) wants="dlrover[k8s]==0.6.1 protobuf" ;;
    *) echo "no peer '$name': expected torchft or dlrover" >&2; exit 2 ;;
  esac
  test -x "$folder/$name/bin/python" || "${PYTHON:-python3}" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install -q --disable-pip-version-check "torch==2.13.0" numpy $wants
  # 0.6.1 starts its master with the arguments of an older torch; the last one, numa_options, is missing.
  find "$folder/$name" -path '*/dlrover/trainer/torch/elastic_run.py' | while read -r file; do
    sed -i 's/SubprocessHandler(cmd, args, {}, "", "", 0)/SubprocessHandler(cmd, args, {}, "", "", 0, None)/' "$file"
  done
done
