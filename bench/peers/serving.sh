#!/bin/sh
# Environments of their own for the servers that bench/serve.py compares with: serving.sh FOLDER [NAME ...]
# Each runs the same ONNX model in ONNX Runtime; none needs torch. TorchServe would, and a JVM besides: it is left out.
# The versions are pinned so that the figures can be repeated. With UV=path/to/uv that installs, else pip.
set -e
folder=$1
shift
runtime="onnxruntime==1.31.1 numpy"
for name in "$@"; do
  case "$name" in
    litserve) wants="litserve==0.2.19 $runtime" ;;
    mlserver) wants="mlserver==1.7.1 $runtime" ;;
    bentoml) wants="bentoml==1.4.30 $runtime" ;;
    # its agents exit where googleapis-common-protos was made for a newer protobuf than is there, and the node with them
    ray) wants="ray[serve]==2.51.1 protobuf==5.29.6 googleapis-common-protos==1.75.0 $runtime" ;;
    kserve) wants="kserve==0.21.0" ;;  # its SDK is a client of ours in the tests, not a server beside it
    *) echo "no peer '$name': expected litserve, mlserver, bentoml, ray or kserve" >&2; exit 2 ;;
  esac
  if test -n "$UV"; then
    test -x "$folder/$name/bin/python" || "$UV" venv -q --python "${PYTHON:-python3}" "$folder/$name"
    "$UV" pip install -q --python "$folder/$name/bin/python" $wants
  else
    test -x "$folder/$name/bin/python" || "${PYTHON:-python3}" -m venv "$folder/$name"
    "$folder/$name/bin/python" -m pip install -q --disable-pip-version-check $wants
  fi
done
