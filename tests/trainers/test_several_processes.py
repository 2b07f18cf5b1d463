"""Two processes that train one client together, against one process with the same examples in each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import max_difference
from trainer_fixtures import Texts, make_trainer, values_of

import partita

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import partita
from trainer_fixtures import Texts, make_trainer, values_of

# One start of two processes for all methods: the imports take most of the time.
# BERT ignores the number of items, by which transformers would multiply the loss.
DDP = {"ddp_backend": "gloo", "average_tokens_across_devices": False}
for name, method in json.loads(sys.argv[2]).items():
    folder = Path(sys.argv[1]) / name
    trainer = make_trainer(folder, Texts(0, 16), evaluates=True, per_device_train_batch_size=2, **DDP)
    client = partita.patch(trainer, method, rounds=3, folder=folder / "run")
    seen = []
    while client.round():
        seen.append(True)
        trainer.train()
    rank = trainer.args.process_index
    torch.save({"values": values_of(trainer), "rounds": len(seen)}, folder / f"rank-{rank}.pt")
"""


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox", "mu": 2.0},
    "fedfrozen": {"name": "fedfrozen", "warmup": 1},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(script), str(folder), json.dumps(METHODS)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert not done.returncode, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_are_one(method: str, played: Path, tmp_path: Path) -> None:
    ranks = [torch.load(played / method / f"rank-{rank}.pt") for rank in (0, 1)]
    trainer = make_trainer(tmp_path, Texts(0, 16), per_device_train_batch_size=4)
    with partita.patch(trainer, METHODS[method], rounds=3) as client:
        while client.round():
            trainer.train()
    assert [rank["rounds"] for rank in ranks] == [3, 3]
    assert max_difference(ranks[0]["values"], ranks[1]["values"]) == 0
    assert max_difference(ranks[0]["values"], values_of(trainer)) < 1e-6
    assert len(partita.load_run(played / method / "run").rows) == 3


def environment() -> dict[str, str]:
    tests = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
