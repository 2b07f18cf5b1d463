"""A small group of two sites, and the folders that are written for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from partita.site.kit.folders import write_files
from partita.site.kit.group import load_group
from partita.site.kit.party_files import group_files

DIGEST = "0123456789abcdef" * 4
GROUP = f"""
name = "hospital group"
experiment = "experiment.toml"
[server]
address = "fl.example.org:8765"
ips = ["203.0.113.5", "2001:db8::5"]
[images]
partita = "registry.example.org/partita@sha256:{DIGEST}"
base = "docker.io/library/python@sha256:{DIGEST}"
nginx = "docker.io/library/nginx@sha256:{DIGEST}"
[[site]]
name = "north"
data = "/srv/data/north"
ips = ["198.51.100.0/24", "2001:db8:1::7"]
[[site]]
name = "south"
data = "/srv/data/south"
ips = ["192.0.2.7"]
folder = "/home/research/south"
[site.set]
"engine.device" = "cuda"
"""
EXPERIMENT = """
rounds = 3
[method]
name = "fedper"
[data]
name = "images"
path = "DATA"
channels = 1
[split]
name = "site"
sites = ["north", "south"]
[model]
name = "vit"
layers = 2
width = 16
patch = 2
[federation]
max_examples = 100
"""


def write_experiment(folder: Path, text: str = EXPERIMENT) -> None:
    """Write an experiment, and images of two classes for the server."""
    for number in range(8):
        path = folder / "data" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 30 * number, dtype=np.uint8)).save(path)
    (folder / "experiment.toml").write_text(text.replace("DATA", str(folder / "data")))


def write_kit(folder: Path, group: str = GROUP, experiment: str = EXPERIMENT, force: bool = False) -> Path:
    """Write a group and all its folders, and return the folder that holds them."""
    write_experiment(folder, experiment)
    (folder / "group.toml").write_text(group)
    write_files(group_files(load_group(folder / "group.toml")), folder / "parties", force)
    return folder / "parties"
