"""Starts a JupyterLab for a test, with settings and kernels of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOKEN = "for-this-test-only"


@contextlib.contextmanager
def jupyterlab(folder: Path, scratch: Path) -> Iterator[str]:
    """A JupyterLab that shows `folder`.

    Yields its address; it is stopped at the end, with its kernels.
    """
    folders = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
        "IPYTHONDIR",
    )
    environment = {
        **os.environ,
        **{name: str(scratch / name) for name in folders},
        "PYTHONPATH": str(ROOT),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.port=0",
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.expose_app_in_browser=True",
    ]
    command = [sys.executable, "-m", "parallel101", "lab", "--lessons", str(folder), *options]
    server = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    address = next(
        (
            match[1]
            for line in server.stderr
            if (match := re.search(r"(http://(?:localhost|127\.0\.0\.1):\d+)/lab", line))
        ),
        None,
    )
    assert address, "JupyterLab did not start"
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    try:
        yield address.replace("localhost", "127.0.0.1")
    finally:  # the server ends its kernels first
        request = urllib.request.Request(
            f"{address}/api/shutdown", data=b"", headers={"Authorization": f"token {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=30):
            pass
        server.wait(30)
        drain.join()
        server.stderr.close()
