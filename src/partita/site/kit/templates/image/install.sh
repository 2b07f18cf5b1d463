#!/usr/bin/env bash
# Installs partita from wheelhouse/ into a new virtual environment, without a network: ./install.sh /opt/partita/venv
set -euo pipefail
target=$(realpath -m "${1:?name the folder of the virtual environment}")
cd "$(dirname "$0")"
sha256sum --check --quiet --strict SHA256SUMS
python3 -m venv "$target"
"$target/bin/python" -m pip install --no-index --find-links wheelhouse --no-deps --require-hashes --requirement requirements.lock
chmod -R go+rX "$target"
