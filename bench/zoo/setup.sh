#!/bin/sh
# An environment for the zoo of the capture benchmark: setup.sh FOLDER. It sees the packages of the environment that
# $PYTHON belongs to and adds transformers, pinned so that the figures can be repeated. Nothing else is fetched: all
# weights are random.
set -e
folder=$1
python=${PYTHON:-python3}
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
test -x "$folder/bin/python" || "$python" -m venv "$folder"
inside=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" > "$inside/beside.pth"
"$folder/bin/python" -m pip install -q --no-compile --disable-pip-version-check transformers==5.23.0
