"""Compare ENTAME with its peers: models × data sets × methods × seeds, then tables and figures of the results.

    python scripts/reproduce.py run --suite offline
    accelerate launch --multi_gpu --num_processes 16 scripts/reproduce.py run --suite offline
    python scripts/reproduce.py report --results scripts/results/offline.jsonl

Every run is a short training through `EntameTrainer` and leaves one JSON line; runs whose line is there are skipped.
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
    run = commands.add_parser("run", help="train what a suite asks for and no line is there of")
    run.add_argument("--suite", required=True, help="a name in scripts/suites, or the path of a YAML file")
    run.add_argument("--results", type=Path, help="file of JSON lines; by default scripts/results/SUITE.jsonl")
    run.add_argument("--models", nargs="+", metavar="LABEL", help="a part of the suite; all by default")
    run.add_argument("--datasets", nargs="+", metavar="LABEL", help="likewise")
    run.add_argument("--methods", nargs="+", metavar="LABEL", help="likewise")
    run.add_argument("--seeds", type=int, help="how many, counted from 0")
    run.add_argument("--dry_run", action="store_true", help="list what there is to do, and do nothing")
    report = commands.add_parser("report", help="write tables and figures")
    report.add_argument("--results", type=Path, nargs="+", required=True, help="files of JSON lines")
    report.add_argument("--output", type=Path, help="folder; by default the first file's name without its ending")
    options = parser.parse_args(argv)
    # The rest is imported below: it may ask for GPUs and for other processes, and neither is asked twice.
    if options.command == "report":
        from reproduction.report import write_report

        print(write_report(options.results, options.output or options.results[0].with_suffix(""))[0])
        return 0
    # Bars of many short trainings, beside each other, tell nothing.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from reproduction.processes import take_place

    place = take_place()
    from reproduction.running import plan, run_suite
    from reproduction.suite_file import read_suite

    suite = read_suite(options.suite)
    cells = suite.cells(options.models, options.datasets, options.methods, options.seeds)
    results = options.results or FOLDER / f"{suite.name}.jsonl"
    if options.dry_run:
        print(plan(cells, results))
        return 0
    return run_suite(suite.name, cells, results, place)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on with the runs that are left.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        from entame_hf import InputError

        if not isinstance(error, InputError):
            raise
        print(f"reproduce.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
