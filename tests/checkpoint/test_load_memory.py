"""Peak host memory of a load, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
# Share of the largest parameter that the peak may lie above what stays resident. Measured at K3's
# real shapes with 96 experts (5.75 GB): 0.0 on one device, 0.006 on eight. A second copy of the
# buffer would be 1.0.
BEYOND_RESIDENT = 0.2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("devices", [1, 8])
def test_peak_is_what_stays(devices):
    command = [sys.executable, SCRIPT, "--divide", "4", "--experts", "48", "--json"]
    command += ["--vocabulary", "65536", "--devices", str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["resident"] > 400e6
    assert result["beyond_resident"] < BEYOND_RESIDENT
