"""Errors carry their remedy as data, over every border that they cross, and the command line puts it into words."""

import errno
import json
import pickle

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from ddm_ray.cli import main
from ddm_ray.cli.fixes import option, phrase
from ddm_ray.errors import CorruptArtifact, DataError, DDMError, StorageError, TrainingError
from ddm_ray.exit_codes import exit_code
from ddm_ray.remedies import Accept, Allow, Begin, Fix, Give, Make, Mend, Resume
from ddm_ray.spelling import one_line
from ddm_ray.store.refusals import as_storage_error, refusal

# Each fix with its words in a library and on the command line.
FIXES: dict[Fix, tuple[str, str]] = {
    Make("runs/a", "rows"): ("make rows", "make it with: ddm prepare runs/a"),
    Make("runs/a", "rows/cluster=002"): (
        "make rows/cluster=002",
        "make it with: ddm prepare runs/a --cluster 2 --source URI",
    ),
    Make("runs/a", "partition", "runs/a/partition"): (
        "delete runs/a/partition and make partition again",
        "delete runs/a/partition, then: ddm partition runs/a",
    ),
    Make("runs/a", "partition/shards/cluster=011"): (
        "make partition/shards/cluster=011",
        "make it with: ddm partition runs/a --cluster 11",
    ),
    Make("runs/a", "experts/003"): ("make experts/003", "make it with: ddm train runs/a expert 3"),
    Make("runs/a", "router"): ("make router", "make it with: ddm train runs/a router"),
    Make("runs/a", "eval/x-1"): ("make eval/x-1", "make it with: ddm evaluate runs/a --name x-1"),
    Mend("my run #1", "experts/003"): (
        "mend experts/003, as an examination of the run advises",
        "mend it with: ddm doctor 'my run #1' --deep --mend",
    ),
    Resume("runs/a", "experts/003", 50): (
        "trained again, experts/003 goes on from step 50",
        "`ddm train runs/a expert 3` goes on from step 50",
    ),
    Resume("runs/a", "router", 0): (
        "trained again, router starts from step 0",
        "`ddm train runs/a router` starts from step 0",
    ),
    Resume("runs/a", "experts/003", 50, on_island=True): (
        "trained again, experts/003 goes on from step 50",
        "`ddm work runs/a --island NAME` on any island goes on from step 50",
    ),
    Make("runs/a", "rows", first=True): ("first make rows", "begin with: ddm prepare runs/a"),
    Make("runs/a", "experts/000", with_others=True): (
        "make experts/000 and the other models",
        "make it with: ddm train runs/a all",
    ),
    Make("my run #1", "experts/003", "my run #1/experts/003"): (
        "delete my run #1/experts/003 and make experts/003 again",
        "delete 'my run #1/experts/003', then: ddm train 'my run #1' expert 3",
    ),
    Allow("my run #1", "router"): (
        "take back the request that router stops",
        "take that back with: ddm islands resume 'my run #1' router",
    ),
    Accept("$HOME", "experts/000"): ("accept experts/000", "accept it with: ddm accept '$HOME' expert 0"),
    Begin("my run #1"): ("begin a run there", "begin one with: ddm init 'my run #1' --recipe NAME"),
    Begin("runs/a"): ("begin a run there", "begin one with: ddm init runs/a --recipe NAME"),
    Begin(field="data.channels", value="4"): (
        "begin a run with data.channels=4",
        "begin a run with --set data.channels=4",
    ),
    Give("scratch", "choose another folder"): (
        "choose another folder (scratch)",
        "choose another folder with --scratch",
    ),
    Give("max_rejected", "go on", "0.3"): ("go on (max_rejected=0.3)", "go on with --max-rejected 0.3"),
    "fetch it again": ("fetch it again", "fetch it again"),
}


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_fix_in_words(fix: Fix) -> None:
    error = DDMError("it broke", fix)
    library, command_line = FIXES[fix]
    assert str(error) == f"it broke; {library}"
    assert error.text(phrase) == f"it broke; {command_line}"


@pytest.mark.parametrize("fix", [None, *FIXES], ids=str)
def test_an_error_crosses_borders_whole(fix: Fix | None) -> None:
    error = CorruptArtifact("x: altered", fix)
    as_json = DDMError.from_fields(json.loads(json.dumps(error.to_fields())))
    for again in (pickle.loads(pickle.dumps(error)), cloudpickle.loads(cloudpickle.dumps(error)), as_json):
        assert (type(again), again.message, again.fix) == (CorruptArtifact, "x: altered", fix)
    by_ray = RayTaskError("f", "traceback", error).as_instanceof_cause()
    assert isinstance(by_ray, CorruptArtifact) and by_ray.text(phrase) == error.text(phrase)


@pytest.mark.parametrize("passes", [True, False])
def test_whether_an_error_passes_crosses_borders(passes: bool) -> None:
    error = StorageError("x", passes=passes)
    by_ray = RayTaskError("f", "traceback", error).as_instanceof_cause()
    as_json = DDMError.from_fields(json.loads(json.dumps(error.to_fields())))
    for again in (pickle.loads(pickle.dumps(error)), cloudpickle.loads(cloudpickle.dumps(error)), as_json, by_ray):
        assert again.passes is passes and exit_code(again) == (75 if passes else 1)


@pytest.mark.parametrize(
    "fix",
    [
        *(3, [], {}, {"do": "Make"}, {"do": []}, {"do": "open", "run": "x"}),
        {"do": "Make", "run": "x", "artifact": 3},
        {"do": "Make", "run": "x", "artifact": "rows", "force": "y"},
        {"do": "Resume", "run": "x", "artifact": "router", "step": "last"},
    ],
)
def test_fields_that_another_version_wrote_are_read_as_far_as_they_go(fix: object) -> None:
    error = TrainingError.from_fields({"error": "x", "kind": "Path", "fix": fix})
    assert (type(error), str(error), error.fix) == (TrainingError, "x", None)


def test_every_argument_of_a_fix_is_an_option() -> None:
    options = {name for command in main.commands.values() for parameter in command.params for name in parameter.opts}
    for argument in ("scratch", "cluster", "source", "max_rejected", "islands", "island", "address", "port", "host"):
        assert option(argument) in options
    assert option("prometheus") in options


def test_one_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line(ValueError("first\nsecond"), 5) == "first"
    assert one_line(ValueError("first\nsecond"), 6, tail=True) == "second"
    assert one_line(ConnectionResetError()) == "ConnectionResetError"
    assert one_line("") == ""


def test_what_storage_refuses() -> None:
    for where, shown in (("/a", ": /a/b"), ("/a/b", "")):
        with pytest.raises(StorageError, match=f"^{where}: Permission denied{shown}; x$"), as_storage_error(where, "x"):
            raise PermissionError(errno.EACCES, "whatever", "/a/b")
    with pytest.raises(DataError, match=r"^/a: No such file or directory$"), as_storage_error("/a", missing=DataError):
        raise FileNotFoundError(errno.ENOENT, "whatever", "/a")
    passing = dict.fromkeys((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE), True)
    lasting = (errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)
    for number, passes in {**passing, **dict.fromkeys(lasting, False)}.items():
        for refused in (OSError(number, "whatever"), OSError(f"Unable to write to /a: x (os error {number})")):
            with pytest.raises(StorageError) as caught, as_storage_error("/a"):
                raise refused
            assert caught.value.passes is passes
            assert ("free some space there" in caught.value.text()) is (number == errno.ENOSPC)
    with pytest.raises(KeyError), as_storage_error("/a"):
        raise KeyError
    assert refusal(OSError("When reading\nbucket \x1bx\n\nDebug source:\nabc")) == "When reading bucket \\x1bx"


def test_a_missing_key_is_named_not_the_address_that_would_hand_one_out() -> None:
    refused = OSError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1 s\n\nDebug:")
    text = refusal(refused)
    assert text.startswith("no key: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ")
    assert text.endswith("(asked in vain: http://169.254.169.254)")
