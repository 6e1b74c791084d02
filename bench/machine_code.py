"""Machine code of a kernel, without a GPU: registers, spills, instructions by kind, loops, ptxas's notes.

    python bench/machine_code.py --op kda_chunk_prefill --op gdn_chunk_prefill [--variants] [--keep FOLDER]

It compiles the kernels of the bench's cases as for an H200 (`tests/kernels/compile_for_hopper.py`), each launch once.
Each loop has its own line, and outer loops include inner ones. An SM issues instructions x warps / 4 per program, and a
loop counts once per iteration. Three findings cost most so far (docs/kernels.md, "Lessons for speed"). They are loads
of 2 bytes (U16) in place of 16, calls of slow divisions and roots, and repeated exponentials (MUFU) of one value. The
flag `--keep` writes PTX, TTGIR and SASS of each.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.kernels import compile_for_hopper as build

# Columns of the table; other instructions have none.
KINDS = ("HGMMA", "HMMA", "LDG", "LDGSTS", "STG", "LDS", "LDSM", "STS", "LDL", "STL", "BAR", "MUFU", "CALL", "SHFL")
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)


def sass(cubin: bytes) -> str:
    """Return the machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([build.CUOBJDUMP, "-sass", file.name], check=True, capture_output=True, text=True)
    return run.stdout


def notes(ptx: str) -> list[str]:
    """Return ptxas's notes on registers, spills and waiting products."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [build.get_ptxas(build.TARGET.arch).path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    return re.findall(r"\(C75\d\d\).*|Used \d+ registers|[1-9]\d* bytes spill stores", said.stdout + said.stderr)


def count_instructions(instructions: list[str]) -> str:
    """Count all instructions, those of each of KINDS, and loads of 2 bytes."""
    names = [re.sub(r"^@!?U?P\w+\s+", "", text).split(" ")[0] for text in instructions]
    kinds = Counter(name.split(".")[0] for name in names)
    words = [f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind]]
    narrow = sum(name.startswith("LDG") and ".U16" in name for name in names)
    return f"{len(names)} instructions: {', '.join(words)}" + (f"; LDG of 2 bytes {narrow}" if narrow else "")


def report(name: str, kernel: Any) -> None:
    """Print the lines of one kernel."""
    text = sass(kernel.asm["cubin"])
    lines = [(int(at, 16), what) for at, what in LINE.findall(text)]
    print(f"{name}: {kernel.metadata.shared} bytes shared; {'; '.join(notes(kernel.asm['ptx']))}")
    print(f"    {count_instructions([what for _, what in lines])}")
    for at, what in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", what)
        # The last instruction of a program branches to itself.
        if target and int(target[1], 16) < at:
            body = [here for place, here in lines if int(target[1], 16) <= place <= at]
            print(f"    loop of {count_instructions(body)}", flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--op", action="append", required=True, help="an op of the kernels' bench (may be repeated)")
    parser.add_argument("--variants", action="store_true", help="compile each config of its cases")
    parser.add_argument("--keep", type=Path, help="write PTX, TTGIR and SASS there")
    args = parser.parse_args()
    launch, seen = JITFunction.run, set[str]()

    def compiled(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        named = [f"{key}={value}" for key, value in options.items() if key.isupper() or key.startswith("num_")]
        report(f"{self.__name__} {' '.join(named)}", kernel)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            stem = args.keep / f"{self.__name__}_{kernel.hash[:8]}"
            stem.with_suffix(".sass").write_text(sass(kernel.asm["cubin"]))
            for kind in ("ptx", "ttgir"):
                stem.with_suffix(f".{kind}").write_text(kernel.asm[kind])

    JITFunction.run = compiled
    build.pretend()
    with build.NoStorage():
        for case in build.all_cases(build.Selection(ops=args.op)):
            for run in (case.run, *(variant for _, variant in case.variants if args.variants)):
                run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
