"""Compile the bench's kernel launches for an H200 without a GPU: `compile_for_hopper.py [N [OP or MODEL ...]]`.

With models it compiles the launches of their steps (`--model` of the bench). The interpreter has neither a compiler nor
Gluon, so a kernel that it runs may still not build. Here the wrappers run whole, on tensors without storage that claim
to be on a GPU, and launches stop after ptxas.

The first N builds of each kernel (all by default) are reported, one JSON line each. Launches that differ in early,
static, tail, counts, choice of experts, shared expert or row width count as different kernels. Fields:

- op, shape, kernel, bytes of shared memory, bytes of stack per thread
- early: the kernel is launched before the one ahead ends. static: its weight is static
- waits: it waits before it reads memory (see `moeyard_kernels.common.dependent`). always_waits: every program waits
- triggers_first: it lets the next launch begin before its own wait
- row_sums: layout of row sums over threads
- serialized: ptxas makes the steps of its products wait for each other
- kinds of atomics in its machine code. RED returns nothing, so no thread waits for it
- digest of the PTX, which shows that an edit changed no code
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from kernel_cases.model_steps import MODELS
from kernel_times import Selection, all_cases
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moeyard_kernels.linear_attention.delta_step import TwoLaunches

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGET = GPUTarget("cuda", 90, 32)
# The properties of an H200 that the wrappers read.
DEVICE = SimpleNamespace(multi_processor_count=132, major=9, minor=0)


class Driver:
    """The driver functions that Triton calls before a launch."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class NoStorage(TorchFunctionMode):
    """Create GPU tensors without storage. A value that is read from one is 1."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("item", "__int__"):
            return 1
        if name == "pin_memory":
            return args[0]
        if name == "cuda" or (name == "to" and str(args[1]).startswith("cuda")):
            return args[0].to("meta")
        if "device" in kwargs:
            kwargs["device"] = "meta"
        # A CPU generator does not fit there, and no number is drawn.
        kwargs.pop("generator", None)
        return func(*args, **kwargs)


class AnyGenerator(torch.Generator):
    """A CPU generator for any named device, since this torch may have no other."""

    def __new__(cls, device: object = None) -> "AnyGenerator":
        return super().__new__(cls)


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of local memory per thread, spilled registers included."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
    return sum(int(n) for n in re.findall(r"STACK:(\d+)", usage.stdout))


def serialized(ptx: str) -> bool:
    """Return whether ptxas serializes the steps of a product (its notes C7510 to C7519)."""
    if "wgmma" not in ptx:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(TARGET.arch).path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        output = subprocess.run(command, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr
    return "(C751" in output.stdout + output.stderr


def atomics(ptx: str, cubin: bytes) -> list[str]:
    """Return the atomics on global memory: ATOM and ATOMG return the old value, RED and REDG do not."""
    if not re.search(r"\b(atom|red)\.", ptx):
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([CUOBJDUMP, "--dump-sass", file.name], check=True, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r"\b(ATOMG?|REDG?)\.", code)))


def waits(ptx: str) -> bool:
    """Return whether the kernel waits for earlier launches before it reads global memory.

    Stores do not count, because the code of warps that store others' results may come first (Triton 3.6).
    """
    body = ptx[ptx.index(".entry") :]
    first = re.search(r"\b(ld|atom|red)\.(\w+\.)*global|cp\.async", body)
    return first is None or 0 <= body.find("griddepcontrol.wait") < first.start()


def triggers_first(ptx: str) -> bool:
    """Return whether the kernel lets the next launch begin before its own wait."""
    trigger = ptx.find("griddepcontrol.launch_dependents")
    return 0 <= trigger < ptx.find("griddepcontrol.wait")


def always_waits(ptx: str) -> bool:
    """Return whether every program waits: no branch comes before the wait."""
    body = ptx[ptx.index(".entry") :]
    wait = body.find("griddepcontrol.wait")
    return wait >= 0 and re.search(r"\b(bra|ret)\b", body[:wait]) is None


def row_sums(ttgir: str) -> list[list[Any]]:
    """Return (columns, columns per thread, threads of a warp, warps) of each fp32 sum along rows.

    Kernels with equal values give the same bits: they sum by thread, then across the warp, then across warps
    (`moeyard_kernels.elementwise.rms_norm`).
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir, re.MULTILINE))
    sums = r'"tt\.reduce"\(%[^)]*\) <\{axis = 1.*\n.*\n.*arith\.addf.*\n.*\n.*\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>'
    found = set()
    for columns, layout in re.findall(sums, ttgir):
        # All other layouts belong to products.
        if layout not in layouts:
            continue
        found.add((int(columns), *(int(pair[1]) for pair in re.findall(r"\[(\d+), (\d+)\]", layouts[layout])[:3])))
    return sorted(map(list, found))


def digest(ptx: str) -> str:
    """Return a digest of the instructions, which contain no source locations (see `pretend`)."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


def pretend() -> None:
    """Make torch and Triton believe in a GPU, and omit source lines from PTX."""
    triton.knobs.compilation.disable_line_info = True
    driver.set_active(Driver())
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda _=None: DEVICE  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda _=None: (DEVICE.major, DEVICE.minor)
    torch.cuda.synchronize = lambda _=None: None  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda _=None: "NVIDIA H200"
    torch.Generator = AnyGenerator  # type: ignore[misc]


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
    built: list[tuple[Any, ...]] = []
    op = ""
    # Builds are counted per op, so a report does not depend on the other ops of the run.
    seen: set[tuple[str, str]] = set()
    count: Counter[tuple[object, ...]] = Counter()
    launch = JITFunction.run

    def build(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # The code before the wait depends on these, and so does the layout of a tile. Some are operands.
        variant = (bool(kwargs.get("TAIL")), kwargs.get("BD"), kwargs.get("GATED"), kwargs.get("LEFT"))
        variant += ("KEYS" in kwargs and kwargs["AHEAD"], bool(kwargs.get("ROWS")), kwargs.get("ONE"))
        variant += (bool(kwargs.get("E")), bool(kwargs.get("SHARED")), bool(kwargs.get("HAS_COUNTS")))
        kind = (self.__name__, kwargs.get("launch_pdl", False), kwargs.get("STATIC"), variant)
        if count[op, *kind] >= most:
            return
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if (op, kernel.hash) not in seen:
            seen.add((op, kernel.hash))
            count[op, *kind] += 1
            built.append((*kind, kernel))

    JITFunction.run = build
    pretend()
    with NoStorage():
        models = [name for name in sys.argv[2:] if name in (*MODELS, "all")]
        for case in all_cases(Selection(ops=[name for name in sys.argv[2:] if name not in models], models=models)):
            op = case.op
            for run in (case.run, *(variant for _, variant in case.variants)):
                run()
                if case.op in ("linear", "head_linear"):
                    run(static_weight=False)
                elif case.op in ("gqa_decode", "rope_gqa_decode", "mla_decode"):
                    run(static_tables=False)
                elif case.op in ("gdn_step", "kda_step"):
                    run(static_state=True, config=TwoLaunches(BV=16, num_warps=1, EARLY=True))
            for name, early, static, variant, kernel in built:
                line = {"op": case.op, "shape": case.shape, "kernel": name, "shared": kernel.metadata.shared}
                line |= {"stack": stack_bytes(kernel.asm["cubin"]), "ptx": digest(kernel.asm["ptx"])}
                line |= {"early": early, "static": bool(static), "waits": waits(kernel.asm["ptx"])}
                line |= {
                    "triggers_first": triggers_first(kernel.asm["ptx"]),
                    "always_waits": always_waits(kernel.asm["ptx"]),
                }
                line |= {"row_sums": row_sums(kernel.asm["ttgir"]), "serialized": serialized(kernel.asm["ptx"])}
                line |= {
                    "beside": variant[-2],
                    "counts": variant[-1],
                    "atomics": atomics(kernel.asm["ptx"], kernel.asm["cubin"]),
                }
                print(json.dumps(line), flush=True)
            built.clear()


if __name__ == "__main__":
    main()
