"""Compile, without a GPU, what the bench launches and tunes on an H200: `compile_for_hopper.py [N [OP or MODEL ...]]`.

With models, what their steps launch (`--model` of the bench). The interpreter runs no compiler, and no Gluon: a kernel
that it likes may still not build. Here the wrappers run whole,
on tensors without storage that say they are on a GPU; launches stop after ptxas. Of each kernel the first N builds (all
if not given) are reported, a line of JSON each: op, shape, kernel, bytes of shared memory, bytes of stack of a thread,
whether it is launched early, whether its weight is called static, whether it waits before it reads memory (see
`moeyard_kernels.common.dependent`) and lets the next launch begin only behind that, how rows are dealt out to threads
where they are summed, whether ptxas makes the steps of its products wait for each other, the kinds of atomics in its
machine code (RED returns nothing, so that nobody waits for it), and a digest of the PTX, by which an edit that should
change no code shows that it did not. Those launched early, static, with a tail, with counts, choosing experts,
beside a shared one or with rows of another width count as others.
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
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moeyard_kernels.linear_attention.delta_step import TwoLaunches

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# An H200, as far as the wrappers ask.
DEVICE = SimpleNamespace(multi_processor_count=132, major=9, minor=0)


class Driver:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class NoStorage(TorchFunctionMode):
    """Whatever is asked for on a GPU is made without storage; a value read from it is 1."""

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
        # A generator of the CPU's does not fit there, and nothing is drawn.
        kwargs.pop("generator", None)
        return func(*args, **kwargs)


class AnyGenerator(torch.Generator):
    """A generator of the CPU's, whatever device is named: this torch may know no other."""

    def __new__(cls, device: object = None) -> "AnyGenerator":
        return super().__new__(cls)


def stack_bytes(cubin: bytes) -> int:
    """What a thread keeps in local memory (registers spilled among it)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
    return sum(int(n) for n in re.findall(r"STACK:(\d+)", usage.stdout))


def serialized(ptx: str) -> bool:
    """Whether ptxas says that each step of a product waits for the one before (its notes C7510 to C7519)."""
    if "wgmma" not in ptx:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    return "(C751" in said.stdout + said.stderr


def atomics(ptx: str, cubin: bytes) -> list[str]:
    """Which atomics ptxas made for global memory, ATOM and ATOMG that give back what was there, and RED and REDG."""
    if not re.search(r"\b(atom|red)\.", ptx):
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([CUOBJDUMP, "--dump-sass", file.name], check=True, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r"\b(ATOMG?|REDG?)\.", code)))


def waits(ptx: str) -> bool:
    """Whether the kernel waits for the launches before it ahead of all it reads from global memory.

    Stores are left out: the text of warps that store what others read may come first (Triton 3.6).
    """
    body = ptx[ptx.index(".entry") :]
    first = re.search(r"\b(ld|atom|red)\.(\w+\.)*global|cp\.async", body)
    return first is None or 0 <= body.find("griddepcontrol.wait") < first.start()


def triggers_first(ptx: str) -> bool:
    """Whether the kernel lets the next launch begin while it still waits for those before it."""
    trigger = ptx.find("griddepcontrol.launch_dependents")
    return 0 <= trigger < ptx.find("griddepcontrol.wait")


def always_waits(ptx: str) -> bool:
    """Whether no program can end without having waited: nothing branches ahead of the wait."""
    body = ptx[ptx.index(".entry") :]
    wait = body.find("griddepcontrol.wait")
    return wait >= 0 and re.search(r"\b(bra|ret)\b", body[:wait]) is None


def row_sums(ttgir: str) -> list[list[Any]]:
    """[columns, and of them to a thread, threads of a warp, warps] of each sum of fp32 along rows.

    Kernels that sum rows of so many columns alike give the same bits: thread by thread, then across the warp, then
    across warps (`moeyard_kernels.elementwise.rms_norm`).
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir, re.MULTILINE))
    sums = r'"tt\.reduce"\(%[^)]*\) <\{axis = 1.*\n.*\n.*arith\.addf.*\n.*\n.*\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>'
    found = set()
    for columns, layout in re.findall(sums, ttgir):
        # Other layouts are those of products.
        if layout not in layouts:
            continue
        found.add((int(columns), *(int(pair[1]) for pair in re.findall(r"\[(\d+), (\d+)\]", layouts[layout])[:3])))
    return sorted(map(list, found))


def digest(ptx: str) -> str:
    """Of the instructions, which name no place in our files (see `pretend`)."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


def pretend() -> None:
    """Make torch and Triton believe in the GPU, and leave lines of source out of PTX."""
    triton.knobs.compilation.disable_line_info = True
    driver.set_active(Driver())
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda _=None: DEVICE  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda _=None: (DEVICE.major, DEVICE.minor)
    torch.cuda.synchronize = lambda _=None: None  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda _=None: "NVIDIA H200"
    torch.Generator = AnyGenerator  # type: ignore[misc]


def main() -> None:
    """See the module."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
    built: list[tuple[Any, ...]] = []
    op = ""
    # Counted for each op, so that its report does not depend on the other ops of the run.
    seen: set[tuple[str, str]] = set()
    count: Counter[tuple[object, ...]] = Counter()
    launch = JITFunction.run

    def build(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # What may happen ahead of the wait depends on these, and where the parts of a tile lie; or they are operands.
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
