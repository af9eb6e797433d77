"""Fuzz one parser, or list them: ``python tests/fuzz [PARSER] [--seconds N] [--out FOLDER] [libFuzzer's options]``."""

import argparse
import sys
import warnings
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["holdfast", "holdfast_lab", "json.decoder", "http.server", "tomllib"]):
    from fuzz.parsers import PARSERS


def main() -> None:
    """Fuzz until the time is over, or something is found: then what was read is left in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parser", nargs="?", choices=PARSERS, help="without it they are listed")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-out"), help="keeps what was found to be new, and findings"
    )
    options, more = parser.parse_known_args()
    if options.parser is None:
        print(*PARSERS, sep="\n")
        return
    warnings.simplefilter("ignore")
    target, corpus = PARSERS[options.parser], options.out / options.parser
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    limits = ["-timeout=10", "-rss_limit_mb=4096", "-max_len=16384", "-print_final_stats=1"]
    limits += [f"-max_total_time={options.seconds}", f"-artifact_prefix={corpus}-found-"]
    atheris.Setup([sys.argv[0], *limits, *more, str(corpus)], target.read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
