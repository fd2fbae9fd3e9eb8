"""Jobs of several processes, each with devices of its own, on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(job, arguments, **environment):
    """Runs a program in as many processes as there are lists of arguments.

    Its first two arguments are the address of the job's service and the number of the process.

    Returns:
        For each process its exit status, what it printed, and its errors.
    """
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        address = f"localhost:{taken.getsockname()[1]}"
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", job, address, str(number), *map(str, own)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        for number, own in enumerate(arguments)
    ]
    outputs = [process.communicate(timeout=500) for process in processes]
    return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]
