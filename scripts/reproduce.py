"""Compare ENTAME with other methods: models × datasets × methods × seeds, then tables and a picture of the results.

    python scripts/reproduce.py run --suite offline
    accelerate launch --multi_gpu --num_processes 16 scripts/reproduce.py run --suite offline
    python scripts/reproduce.py report --results scripts/results/offline.parquet

Each run is a short training through `EntameTrainer` and leaves one result row. Runs whose row exists are skipped.
Processes that accelerate starts share the runs: each trains alone, any number of them on one GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train the runs of a suite that have no result row yet")
    run.add_argument("--suite", nargs="+", required=True, help="names in scripts/suites, or paths of YAML files")
    run.add_argument("--results", type=Path, help="Parquet file; by default scripts/results/SUITE.parquet")
    run.add_argument("--models", nargs="+", metavar="LABEL", help="models to run; all by default")
    run.add_argument("--datasets", nargs="+", metavar="LABEL", help="datasets to run; all by default")
    run.add_argument("--methods", nargs="+", metavar="LABEL", help="methods to run; all by default")
    run.add_argument("--seeds", type=int, help="number of seeds, counted from 0; all by default")
    run.add_argument("--dry_run", action="store_true", help="list the runs and train nothing")
    report = commands.add_parser("report", help="write tables and a picture")
    report.add_argument("--results", type=Path, nargs="+", required=True, help="Parquet files")
    report.add_argument("--output", type=Path, help="folder; by default the first file's name without its suffix")
    options = parser.parse_args(argv)
    # The imports below ask for GPUs and for other processes, which is possible only once.
    if options.command == "report":
        from reproduction.report import write_report

        output = options.output or options.results[0].with_suffix("")
        print(*write_report(options.results, output), sep="\n")
        return 0
    # Progress bars of many short trainings, side by side, say nothing.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from reproduction.processes import take_place

    place = take_place()
    from reproduction.run import plan, run_suite
    from reproduction.suite import read_suite

    if options.results and len(options.suite) > 1:
        parser.error("--results is one file: leave it out for several suites.")
    # Read all before the first one runs.
    selected = (options.models, options.datasets, options.methods, options.seeds)
    suites = {suite.name: suite.experiments(*selected) for suite in map(read_suite, options.suite)}
    failed = 0
    for name, experiments in suites.items():
        results = options.results or FOLDER / f"{name}.parquet"
        if options.dry_run:
            print(plan(experiments, results))
        else:
            failed |= run_suite(name, experiments, results, place.of(name))
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nInterrupted. The same command continues with the runs that are left.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        from entame_hf import InputError

        if not isinstance(error, InputError):
            raise
        print(f"reproduce.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
