"""Faults on a real `moeyard serve` under load: what they cost, request by request and token by token.

    python bench/drills.py [--faults 20] [--workers 3] [--streams 16] [--seed 0] [--fault KIND] [--json FILE]
    python bench/drills.py --soak MINUTES

The bundled demo model is served on CPUs by the command that everybody uses, Ray included. Streams of seeded and greedy
requests of every kind are asked without pause; what each must answer was taken from the same server before anything was
done to it (of prompts that no cache may know: from the recovered one). Then workers are killed, stopped and made to
fail, at random moments. A fault's line says how many requests were in flight and how many failed, how many tokens were
lost, repeated or different (ids, text and log-probabilities to the last bit), and how long after its last signal tokens
and /readyz came back. Exit code 1 if any fault was not survived. The same seed plans the same faults.

Without --fault there are kills in prefill, in decode, at any point of a step, while idle, two at once, one in the
recovery of another, and stops. `--soak` is random load with everything that clients do to a server, and a kill every
minute; at the end it counts what is left.
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
# An ordinary id that no prompt of a drill has (drilling/asks.py).
POISONED_TOKEN = 4090


def main() -> int:
    """Command line; returns the exit code."""
    args = parse()
    if args.fault == "oom" and controller() is None:
        print("drills: --fault oom needs root and control groups with memory", file=sys.stderr)
        return 2
    # Whoever ends a drill ends its server too.
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
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--faults", type=int, default=20, metavar="N")
    add("--fault", choices=KINDS, help="only these (default: kills and stops of every kind)")
    add("--workers", type=int, default=3, metavar="N")
    add("--streams", type=int, default=16, metavar="N")
    add("--asks", type=int, default=32, metavar="N", help="different requests (default %(default)s)")
    add("--max-tokens", type=int, default=96, metavar="N", help="of the longest answer (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--pace", type=float, default=2.0, metavar="S", help="up to so long between two faults (default %(default)g)")
    add("--patience", type=float, default=90.0, metavar="S", help="for a recovery (default %(default)g)")
    add("--model", type=Path, default=ROOT / "deploy" / "demo", metavar="DIR")
    add("--soak", type=float, metavar="MINUTES")
    add("--kill-every", type=float, default=60.0, metavar="S", help="of a soak (default %(default)g)")
    add("--json", type=Path, metavar="FILE")
    add("--log", type=Path, metavar="FILE", help="keep what the server said on stderr")
    add("--serve", default="", metavar="'FLAGS'", help="more flags for moeyard serve, e.g. '--device cuda'")
    return parser.parse_args()


def serve_arguments(args: argparse.Namespace, model: Path) -> list[str]:
    """Of `moeyard serve`. Its limit of restarts is for crash loops, which a drill looks like."""
    arguments = [str(model), "--workers", str(args.workers), "--port", "0", *args.serve.split()]
    if "--restart-limit" in serve_flags() and "--restart-limit" not in arguments:
        arguments += ["--restart-limit", "1000000"]
    if args.fault == "router":
        # The next one is found at the same place.
        arguments[arguments.index("--port") + 1] = str(free_port())
    return arguments


def free_port() -> int:
    """A port that is free now, outside those that Ray gives to its workers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def drills(server: Server, args: argparse.Namespace) -> int:
    """All faults; returns the exit code."""
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
