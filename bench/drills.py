"""Inject faults into a real `moeyard serve` under load, and compare every token with undisturbed answers.

    python bench/drills.py [--faults 20] [--workers 3] [--streams 16] [--seed 0] [--fault KIND] [--json FILE]
    python bench/drills.py --soak MINUTES

The usual command serves the bundled demo model on CPUs, Ray included. Streams send seeded and greedy requests of every
kind without pause. Reference answers come from the same server before the first fault. For new prompts, which no cache
holds, they come from the recovered server. The drill then kills, stops and breaks workers at random moments.

The line of a fault shows how many requests were in flight and how many failed, and how many tokens were lost, repeated
or different. Ids, text and log-probabilities are compared bit by bit. The line also shows how long after the last
signal tokens and /readyz came back. The exit code is 1 if a fault was not survived. A seed always plans the same
faults.

Without --fault there are kills in prefill, in decode, at any point of a step, while idle, two at once, one in the
recovery of another, and stops. `--soak` is random load from all kinds of clients, with a kill every minute. At the end
it counts what is left.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from drilling.asks import make_asks
from drilling.drive import Drill, Outcome
from drilling.faults import KINDS, plan
from drilling.load import Client, Load, references
from drilling.poison import poison
from drilling.report import COLUMNS, as_json, line, summary
from drilling.server import ROOT, Server, ServerError, serve_flags
from drilling.short_memory import controller
from drilling.soak import soak
from drilling.watch import Watch

START_SECONDS = 180.0
# An ordinary id that no prompt of a drill contains (drilling/asks.py).
POISONED_TOKEN = 4090


def main() -> int:
    """Run the command line and return the exit code."""
    args = parse()
    if args.fault == "oom" and controller() is None:
        print("drills: --fault oom needs root and control groups with memory", file=sys.stderr)
        return 2
    # The end of a drill also ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="moeyard-drills-") as name:
        folder = Path(name)
        model = args.model
        if args.fault == "exception":
            model = folder / "poisoned"
            poison(args.model, model, token_id=POISONED_TOKEN)
        server = Server(folder, serve_arguments(args, model))
        try:
            print(f"ready after {server.wait_ready(START_SECONDS):.1f} s: {server.url}", flush=True)
            begun = time.monotonic()
            code = asyncio.run(soak(server, args) if args.soak else drills(server, args))
            print(f"in {time.monotonic() - begun:.0f} s")
        except (ServerError, RuntimeError) as error:
            print(f"drills: {error}", file=sys.stderr)
            code = 1
        finally:
            server.kill() if server.process.poll() is not None else server.stop()
            if args.log is not None:
                args.log.write_bytes(server.err.read_bytes())
        return code


def parse() -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--faults", type=int, default=20, metavar="N")
    add("--fault", choices=KINDS, help="one kind of fault (default: kills and stops of all kinds)")
    add("--workers", type=int, default=3, metavar="N")
    add("--streams", type=int, default=16, metavar="N")
    add("--asks", type=int, default=32, metavar="N", help="different requests (default %(default)s)")
    add("--max-tokens", type=int, default=96, metavar="N", help="tokens of the longest answer (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--pace", type=float, default=2.0, metavar="S", help="longest pause between two faults (default %(default)g)")
    add("--patience", type=float, default=90.0, metavar="S", help="limit of a recovery (default %(default)g)")
    add("--model", type=Path, default=ROOT / "deploy" / "demo", metavar="DIR")
    add("--soak", type=float, metavar="MINUTES")
    add(
        "--kill-every",
        type=float,
        default=60.0,
        metavar="S",
        help="pause between kills of a soak (default %(default)g)",
    )
    add("--json", type=Path, metavar="FILE")
    add("--log", type=Path, metavar="FILE", help="keep the server's stderr")
    add("--serve", default="", metavar="'FLAGS'", help="more flags for moeyard serve, e.g. '--device cuda'")
    return parser.parse_args()


def serve_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    """Return the arguments of `moeyard serve`. The restart limit is raised, because a drill looks like a crash loop."""
    arguments = [str(model), "--workers", str(args.workers), "--port", "0", *args.serve.split()]
    if "--restart-limit" in serve_flags() and "--restart-limit" not in arguments:
        arguments += ["--restart-limit", "1000000"]
    if args.fault == "router":
        # The next router must have the same address.
        arguments[arguments.index("--port") + 1] = str(free_port())
    return arguments


def free_port() -> int:
    """Return a port that is free now, outside the range that Ray uses for its workers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def drills(server: Server, args: argparse.Namespace) -> int:
    """Inject all faults and return the exit code."""
    rng = random.Random(args.seed)
    faults = plan(args.seed, args.faults, kind=args.fault)
    asks = make_asks(args.seed, args.asks, max_tokens=args.max_tokens)
    client = Client(server.url, seconds=args.patience + 60.0)
    begun = time.monotonic()
    known = await references(client, asks, streams=args.streams)
    tokens = sum(exchange.answer.num_tokens for exchange in known.values())
    print(f"{len(known)} references, {tokens} tokens, in {time.monotonic() - begun:.1f} s", flush=True)
    watch = Watch(server)
    load = Load(client, asks, streams=args.streams, seed=args.seed, max_tokens=args.max_tokens)
    drill = Drill(
        server, client, load=load, watch=watch, known=known, rng=rng, patience=args.patience, poison=POISONED_TOKEN
    )
    outcomes: list[Outcome] = []
    print(COLUMNS, flush=True)
    for number, fault in enumerate(faults, 1):
        await asyncio.sleep(rng.uniform(0, args.pace))
        outcomes.append(await drill.inflict(number, fault))
        print(line(outcomes[-1]), flush=True)
        for error in outcomes[-1].errors[:3]:
            print(f"      {error[:200]}", flush=True)
        if outcomes[-1].ready_seconds is None:
            print("the fleet did not come back: no more faults", flush=True)
            break
    share = await watch.exchange_share()
    await load.close(60.0 if outcomes[-1].ready_seconds is not None else 0.0)
    await watch.close()
    await client.http.aclose()
    beyond = drill.beyond()
    figures = {"planned": len(faults), "requests": len(load.history), "beyond": beyond, "share": share}
    print(summary(outcomes, **figures), flush=True)
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps(as_json(outcomes, settings=settings, **figures), indent=1))
    done = len(outcomes) == len(faults) and all(outcome.survived for outcome in outcomes)
    return 0 if done and not beyond else 1


if __name__ == "__main__":
    sys.exit(main())
