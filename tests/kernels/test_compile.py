"""Every kernel builds for an H200 on a machine without a GPU, which the interpreter cannot show."""

import re
from pathlib import Path

import pytest
import torch
from tests.kernels import hopper_builds

import moeyard_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests build and run all kernels")


# The constraints choose a version between the first two. The last renames calls (moeyard_kernels.common.gluon).
OTHERS = ("3.6.0", "3.8.0", "3.9.0")


@pytest.fixture(scope="module", params=["installed", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def built(request: pytest.FixtureRequest) -> list[hopper_builds.Build]:
    """Builds of each op's kernels: new ones for changed modules, recorded ones for the others."""
    if request.param != "installed":
        made = hopper_builds.build(hopper_builds.MODULES, hopper_builds.other_triton(request.param))
        return [line for name in hopper_builds.MODULES for line in made[name]]
    names = hopper_builds.MODULES if request.config.getoption("all") else hopper_builds.changed()
    record, made = hopper_builds.recorded(), hopper_builds.build(names)
    return [line for name in hopper_builds.MODULES for line in made.get(name) or record[name]["builds"]]


@pytest.mark.slow
@pytest.mark.parametrize("built", ["installed"], indirect=True)
def test_record_is_up_to_date(built: list[hopper_builds.Build]) -> None:
    """`PYTHONPATH=bench python -m tests.kernels.hopper_builds` writes the record."""
    assert hopper_builds.changed() == []
    assert built == [line for name in hopper_builds.MODULES for line in hopper_builds.recorded()[name]["builds"]]


def test_every_kernel_builds(built: list[hopper_builds.Build]) -> None:
    """All functions with a kernel's name are built, so none is missing from the bench."""
    source = "".join(file.read_text() for file in Path(moeyard_kernels.__path__[0]).glob("[aehls]*/*.py"))
    written = set(re.findall(r"^def (\w*kernel)\(", source, re.MULTILINE))
    assert len(written) > 25
    assert written == {line["kernel"] for line in built}


def test_every_kernel_waits_for_its_inputs(built: list[hopper_builds.Build]) -> None:
    """An early launch must wait before it reads. The source says what may be read earlier."""
    early = {(line["kernel"], line["static"]) for line in built if line["early"]}
    # The dense product over codes reads weights only. The three before the last are the experts' second product. It
    # reads the layout and its experts' weights, or the logits by which it chooses one token's experts. All were
    # complete before the launch that triggered it. Earlier users of the memory for ids, weights and counts are done.
    assert {(line["kernel"], line["static"]) for line in built if line["early"] and not line["waits"]} == {
        ("linear_skinny_kernel", True),
        ("linear_packed_kernel", False),
        ("_head_linear_kernel", True),
        ("head_linear_hopper_kernel", True),
        ("_gqa_decode_kernel", True),
        ("_rope_gqa_decode_kernel", True),
        ("_attn_combine_kernel", True),
        ("mla_decode_hopper_kernel", True),
        ("delta_recurrent_kernel", True),
        ("_expert_kernel", False),
        ("expert_slice_kernel", False),
        ("packed_product_kernel", False),
        # It reads the weight of a site first, which does not change while a model serves.
        ("_hyper_sums_kernel", False),
    }
    unless_static = {"linear_skinny_kernel", "_head_linear_kernel", "head_linear_hopper_kernel"}
    unless_static |= {"_gqa_decode_kernel", "_rope_gqa_decode_kernel", "mla_decode_hopper_kernel"}
    unless_static |= {"_attn_combine_kernel", "delta_recurrent_kernel"}
    assert {(kernel, False) for kernel in unless_static} <= early
    attention = {"_gqa_decode_kernel", "_mla_decode_kernel", "mla_decode_pairs_kernel", "_attn_prefill_kernel"}
    experts = {"_count_kernel", "_sum_kernel", "_place_kernel", "_expert_stream_kernel"}
    experts |= {"_cache_access_kernel", "_gather_experts_kernel", "_fetch_experts_kernel"}
    late = {line["kernel"] for line in built if not line["early"]}
    chooses = {"_snapkv_softmax_kernel", "_snapkv_merge_kernel", "_snapkv_weights_kernel"}
    entries = {"_index_scores_kernel", "_attend_entries_kernel", "attend_entries_pairs_kernel"}
    assert late == attention | experts | chooses | entries | {"attn_prefill_hopper_kernel"}


def test_no_product_is_serialized(built: list[hopper_builds.Build]) -> None:
    """ptxas does this, two or three times as slow, if code touches a sum that may still be in progress."""
    assert [line["kernel"] for line in built if line["serialized"]] == []


def test_counts_of_a_gate_use_red(built: list[hopper_builds.Build]) -> None:
    """No thread uses the result of these additions: as RED they do not block the next instruction."""
    for kernel in ("_topk_gate_kernel", "expert_slice_kernel", "packed_product_kernel"):
        gates = {line["counts"]: line["atomics"] for line in built if line["kernel"] == kernel}
        assert gates in ({False: [], True: ["REDG"]}, {False: [], True: ["RED"]}), kernel


def test_launches_complete_in_order(built: list[hopper_builds.Build]) -> None:
    """A kernel that triggers the next launch before its own wait must wait in every program, and so must the next one.

    An early kernel that ended without a wait would tell the launch after it that all work is done.
    """
    first = {line["kernel"] for line in built if line["triggers_first"]}
    assert {
        "_add_rms_norm_kernel",
        "_moe_reduce_add_norm_kernel",
        "_gqa_kernel",
        "_topk_gate_kernel",
        "expert_slice_kernel",
    } <= first
    assert {"_dispatch_kernel", "_combine_kernel"} <= first
    # One program writes the choice before the wait, which all programs reach, with and without a shared expert.
    writes = [line for line in built if line["kernel"] == "expert_slice_kernel" and line["counts"]]
    assert {line["beside"] for line in writes} == {False, True}
    assert [line for line in built if line["triggers_first"] and not line["always_waits"]] == writes
    # A warp of every program waits, and a program without work waits at its end. The experts' second product may end at
    # once, but the first has waited in every program before it triggers the second.
    unseen = {"linear_skinny_kernel", "_gqa_decode_kernel", "mla_decode_hopper_kernel", "_expert_kernel"}
    unseen |= {"_rope_gqa_decode_kernel", "delta_state_kernel", "packed_product_kernel"}
    unwaited = {line["kernel"] for line in built if line["early"] and not line["always_waits"] and line not in writes}
    assert unwaited == unseen
