"""Training whose storage misbehaves, by seeded schedules: a real S3 server behind a proxy, real DeepSpeed, no Ray.

By default each schedule has its trouble at one moment of a short training (tests/train/s3_faults.py): storage away for
5 to 120 s, silent, 500 or 503, a key revoked for up to 60 s, lost answers, 409. Pauses, waits and troubles are
`--scale` times as short as they are for users. Rates are of users' seconds. With `--each-put` five faults befall each
single PUT of a training instead, one a training: it is heeded and answered by 500, or not at all; 503 five times;
silence; 403.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, options  # noqa: E402

from tests.data.s3 import s3_server  # noqa: E402
from tests.train.s3_faults import AT_A_PUT, OnePut, Schedule, trainer  # noqa: E402

MOST_A_SECOND = 10.0


def main() -> None:
    """Run the schedules, and write what became of them."""
    parser = options("Training whose storage misbehaves, by seeded schedules.")
    parser.add_argument("--seeds", type=int, help="number of schedules; 100, with --quick 8, where not given")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--each-put", action="store_true", help="each fault at each single PUT")
    parser.add_argument("--scale", type=float, default=40.0, help="how many times faster all is than for users")
    args = parser.parse_args()
    seeds = range(args.first, args.first + (args.seeds or (8 if args.quick else 100)))
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report()
    failed = other_bits = more_attempts = 0
    rates = [0.0]
    with tempfile.TemporaryDirectory(prefix="ddm-storage-faults-") as name:
        folder = Path(name)
        with s3_server(folder / "s3.log") as server, trainer(server, folder, args.scale) as training:
            undisturbed = training.train()
            schedules: list[Schedule | OnePut] = [*map(Schedule.of, seeds)]
            if args.each_put:
                every = [OnePut(put, fault) for put in range(undisturbed.puts) for fault in AT_A_PUT]
                schedules = [*every[:: 41 if args.quick else 1]]
            for schedule in schedules:
                outcome = training.train(schedule)
                sound = outcome.files == undisturbed.files
                rate = "" if outcome.rate is None else f", {outcome.rate:.2f}/s"
                bits = "equal" if sound else "OTHER"
                report.progress(
                    f"{schedule}: exit {outcome.status}, attempts {outcome.attempts}, {bits} bits,"
                    f" {outcome.refused} refused{rate}"
                )
                failed += outcome.status != 0
                other_bits += not sound
                more_attempts += outcome.attempts > 2
                rates.append(outcome.rate or 0.0)
                if outcome.status:
                    report.progress(training.log.read_text()[-3000:])
    of = f"of {len(schedules)} schedules"
    report.add(Claim(f"trainings that failed, {of}", failed, "", target=0))
    report.add(Claim(f"trainings with other bits than the undisturbed one, {of}", other_bits, "", target=0))
    report.add(Claim(f"trainings that took over one attempt more, {of}", more_attempts, "", target=0))
    report.add(Claim("requests while refused, worst schedule", max(rates), "/s", target=MOST_A_SECOND))
    report.finish(args.json)


if __name__ == "__main__":
    main()
