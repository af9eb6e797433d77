"""What the authentication of the membership store costs: processor time of a MAC at each end, and of a connection.

python benchmarks/scale/authentication.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, timed

from holdfast.membership import Hub, HubStore
from holdfast.membership.authentication import LineAuthenticator

NONCES = ("00" * 16, "11" * 16)
SIZES = (1, 60, 200, 1000, 100_000)


def processor_us(act: Callable[[], object], times: int, rounds: int) -> str:
    """Return median and range of the processor time of ``act`` in microseconds, over rounds of ``times`` calls."""
    took = [timed(lambda: [act() for _ in range(times)], time.process_time) / times * 1e6 for _ in range(rounds)]
    return f"{statistics.median(took):8.2f} ({min(took):.2f} to {max(took):.2f})"


def main() -> None:
    """Measure and print."""
    rounds = command_line(__doc__, rounds=15).parse_args().rounds
    print("bytes of a line    sign, us    verify, us: median (range)")
    for size in SIZES:
        client, hub = (LineAuthenticator("token", NONCES, is_client=end) for end in (True, False))
        line, times = b"x" * (size - 1) + b"\n", max(20, 200_000 // (size + 100))
        signed = iter([client.sign(line)[:-1] for _ in range(times * rounds)])
        verify = processor_us(lambda signed=signed, hub=hub: hub.verify(next(signed)), times, rounds)
        print(f"{size:>7}  {processor_us(lambda client=client, line=line: client.sign(line), times, rounds)}  {verify}")
    with Hub("token") as hub_there:
        connect = processor_us(lambda: HubStore(hub_there.address, "token").close(), 20, rounds)
    print(f"a connection and its end, both ends together, us: {connect}")


if __name__ == "__main__":
    main()
