"""Ask a served mixture for an image and write it as a PNG.

python serving/client.py 7 --out seven.png [--size 256x256] [--seed 1] [--strategy full] [--url URL]

A server that wants a token gets the one in $DDM_TOKEN.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a served mixture for an image and write it as a PNG.")
    parser.add_argument("prompt", help="a class name of the run, e.g. 7")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    for name in ("size", "strategy", "solver"):
        parser.add_argument(f"--{name}")
    for name, kind in (("steps", int), ("seed", int), ("guidance-scale", float)):
        parser.add_argument(f"--{name}", type=kind)
    given = vars(parser.parse_args())
    out, url = given.pop("out"), given.pop("url")
    body = json.dumps({**given, "response_format": "png"}).encode()
    headers = {"Content-Type": "application/json"}
    if "DDM_TOKEN" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['DDM_TOKEN']}"
    request = Request(f"{url}/v1/images/generations", body, headers)
    try:
        with urlopen(request) as response:
            out.write_bytes(response.read())
            degraded = response.headers.get("X-Degraded")
            missing = f", without {degraded}, which is away" if degraded else ""
            print(f"{out}: seed {response.headers['X-Seed']}, experts {response.headers['X-Experts']}{missing}")
    except HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
    except URLError as error:
        sys.exit(f"{url}: {error.reason}; is the mixture being served there?")


if __name__ == "__main__":
    main()
