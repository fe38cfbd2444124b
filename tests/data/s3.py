"""An S3 server of its own process on loopback, for tests of what is read from object stores."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from tests.conftest import answers, end, wait_for

BUCKET = "pictures"


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """A bucket `pictures` on a server of moto's, which this process's environment leads to; the server's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=sink, stderr=sink, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    leads_there = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ALLOW_HTTP": "true",
    }
    before = {name: os.environ.get(name) for name in leads_there}
    os.environ.update(leads_there)
    try:
        wait_for(lambda: answers(f"{url}/moto-api/data.json"), 60, log.read_text)
        s3().create_dir(BUCKET)
        yield url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        end(process)


def s3() -> fs.FileSystem:
    """The file system of the server that the environment leads to."""
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return fs.S3FileSystem(allow_bucket_creation=True, endpoint_override=host, scheme="http")


def upload(folder: Path, prefix: str) -> str:
    """Copy all files of a folder below a prefix of the bucket; its URI."""
    fs.copy_files(str(folder), f"{BUCKET}/{prefix}", destination_filesystem=s3())
    return f"s3://{BUCKET}/{prefix}"
