"""With ten thousand clients, memory depends on the cohort of twenty and does not grow with the rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parent.parent.parent / "examples" / "ten_thousand.toml"

# In a separate process, because this one holds memory of other tests.
MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
from partita.experiment.config import load
from partita.experiment.runner import start

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

sizes = [resident() for _ in start(load(Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2]))]
print(json.dumps(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory as Linux gives it")
@pytest.mark.slow
def test_memory_is_bounded_with_ten_thousand_clients(tmp_path: Path) -> None:
    """With all that grows: parameters and state that stay with each client, and what the server sends and keeps."""
    words = [sys.executable, "-c", MEMORY_SCRIPT, str(CONFIG), str(tmp_path / "run"), "method={name='fedper'}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)  # megabytes after each round
    assert len(sizes) == 40
    assert max(sizes) < 2000
    # By round 20 both kinds of evaluation have run once, so memory should not grow after it.
    assert sizes[-1] - sizes[20] < 0.02 * sizes[20], f"grew from {sizes[20]:.0f} to {sizes[-1]:.0f} MB"
    print(f"{sizes[0]:.0f} MB after the first round, {sizes[20]:.0f} after 21, {sizes[-1]:.0f} after 40")
