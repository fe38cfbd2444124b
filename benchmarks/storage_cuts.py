"""Owners that are cut off from storage while another one begins the same expert: real S3 server, DeepSpeed, no Ray.

An owner is cut off for 5 s, 60 s and 10 minutes, each at three moments: before it has its number, within a state, and
when it commits. The rival begins at that moment. Claims: one manifest, with the bits of a training that nothing
happened to, an attempt each, and nobody writes into the other's. All is `--scale` times as fast as for users.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, options  # noqa: E402

from tests.data.s3 import s3_server  # noqa: E402
from tests.train.cut_off import cuts, rivals  # noqa: E402


def main() -> None:
    """Train through all cuts, and write what became of them."""
    parser = options("Owners that are cut off from storage, and rivals that begin meanwhile.")
    parser.add_argument("--each", type=int, help="cuts of each length at each moment; 20, with --quick 1")
    parser.add_argument("--scale", type=float, default=100.0, help="how many times faster all is than for users")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report()
    every = cuts(args.each or (1 if args.quick else 20))
    failed = other_bits = manifests = attempts = strangers = 0
    with tempfile.TemporaryDirectory(prefix="ddm-storage-cuts-") as name:
        folder = Path(name)
        with s3_server(folder / "s3.log") as server, rivals(server, folder, args.scale) as both:
            undisturbed = both.owner.train().files
            for cut in every:
                outcome = both.train(cut)
                bits = "equal" if outcome.files == undisturbed else "OTHER"
                report.progress(f"{cut}: exits {outcome.statuses}, attempts {outcome.attempts}, {bits} bits")
                failed += any(outcome.statuses)
                if any(outcome.statuses):
                    report.progress("".join(each.log.read_text()[-3000:] for each in (both.owner, both.rival)))
                other_bits += outcome.files != undisturbed
                manifests = max(manifests, outcome.manifests)
                attempts = max(attempts, outcome.attempts)
                strangers += outcome.writers > 1
    of = f"of {len(every)}"
    report.add(Claim(f"trainings of which an owner failed, {of}", failed, "", target=0))
    report.add(Claim(f"trainings with other bits than the undisturbed one, {of}", other_bits, "", target=0))
    report.add(Claim("manifests of a training, most", manifests, "", target=1))
    report.add(Claim("attempts of a training, most", attempts, "", target=2))
    report.add(Claim(f"trainings whose final attempt both wrote to, {of}", strangers, "", target=0))
    report.finish(args.json)


if __name__ == "__main__":
    main()
