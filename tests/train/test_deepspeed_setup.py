"""DeepSpeed's import: it compiles nothing, and nothing is printed."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.contract

IMPORTED = """
import subprocess
started = []
begin = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda process, words, *more, **options: started.append(words) or begin(
    process, words, *more, **options
)
from ddm_ray.train.deepspeed_setup import load_deepspeed

load_deepspeed()
from deepspeed.comm.torch import build_shm_op

assert build_shm_op() is None, "a communicator was compiled"
assert not [words for words in started if "cc" in str(words)], started
"""


def test_deepspeed_compiles_and_prints_nothing() -> None:
    """Where a library is missing, ld would say so: of one that isn't used here."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
