"""Segment tables: every element and every code byte exactly once, cuts where kernels can bear
them.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import codec as reference
from reference import entropy

from gradcomp.codecs import KINDS
from gradcomp.kernels.tables import BLOCK_NUMEL, CHUNK_NUMEL
from gradcomp.payload.form import (
    ENTROPY,
    FORMS,
    ONEBIT,
    PLAIN,
    STREAM_NBYTES,
    STREAM_NUMEL,
    TERNARY,
    lanes_form,
    stream_form,
)
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.parameters import Parameter, assign_buckets, describe_parameters
from gradcomp.payload.pieces import ByElements, Slot, whole_pieces
from gradcomp.plan.nbytes import sliced_nbytes


@given(
    numels=st.lists(st.integers(0, 300_000), min_size=1, max_size=3),
    group=st.sampled_from([1, 5, 8, 25, 64, 512, 5000, 65_537, 131_072, 200_000, 10**6]),
    world=st.sampled_from([1, 2, 3, 8]),
    form=st.sampled_from([TERNARY, ONEBIT, lanes_form(4), lanes_form(64), ENTROPY]),
    whole_groups=st.booleans(),
)
def test_rows_cover_everything_once(numels, group, world, form, whole_groups):
    slots, offset = [], 0
    group, whole_groups = form.group_numel or group, whole_groups or not form.cuts
    for index, numel in enumerate(numels):
        slots.append(Slot(index, numel, group, True, offset))
        offset += numel
    seen = np.zeros(offset, int)
    for rank in range(world):
        pieces = ByElements(world).pieces(slots, rank)
        layout = PayloadLayout(form, pieces, whole_groups=whole_groups)
        codes = np.zeros(layout.nbytes, int)
        for row in layout.packed.rows:
            data, first, start, numel = (int(row[k]) for k in ("data", "codes", "start", "numel"))
            end = start + numel
            seen[data : data + numel] += 1
            codes[first : first + form.code_nbytes(start, end)] += 1
            assert start % 8 == 0
            piece = next(p for p in layout.pieces if p.slot.index == row["parameter"])
            assert data - start == piece.slot.offset
            group_start = max(start // group * group, piece.start)
            assert (start - group_start) % BLOCK_NUMEL == 0
            if whole_groups:
                assert start in (group_start, piece.start)
                assert end % group == 0 or end == piece.start + piece.numel
        assert (codes[32 + 4 * layout.scale_count :] == 1).all()
        assert layout.group_numels.sum() == layout.numel and (layout.group_numels > 0).all()
        for parts in (1, 2, 3, 7):
            ranges = layout.packed.ranges(parts)
            assert sum(count for _, count in ranges) == len(layout.packed)
            assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(ranges))
            assert len(ranges) <= parts
    assert (seen == 1).all()


def test_large_tensors_are_cut_for_threads():
    numel = 10 * CHUNK_NUMEL
    layout = PayloadLayout(TERNARY, whole_pieces([Slot(0, numel, numel, True, 0)]))
    assert len(layout.packed) == 10
    first, second = layout.packed.ranges(2)
    assert first[1] == second[1] == 5


@pytest.mark.parametrize(
    ("world", "bits"), [(2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (15, 5), (16, 6), (64, 8), (127, 8)]
)
def test_lane_bits_are_the_least_that_hold_every_sum(world, bits):
    assert lanes_form(world).bits == bits == int(np.ceil(np.log2(2 * world + 1)))


def test_buckets_as_torchs_reducer_cuts_them():
    assert assign_buckets([4, 4, 4, 4], 8) == [[3, 2], [1, 0]]
    assert assign_buckets([4, 4, 4, 4], 8, 4) == [[3], [2, 1], [0]]
    assert assign_buckets([100, 1], 8) == [[1, 0]]
    assert assign_buckets([], 8) == []


@pytest.mark.parametrize(
    "form", [PLAIN, TERNARY, ONEBIT, lanes_form(5), ENTROPY], ids=lambda form: form.name
)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_sizes_over_ranks_are_those_of_layouts(form, world):
    """The planner's arithmetic over thousands of ranks and the layouts that an exchange runs by
    say the same bytes.
    """
    numels = [0, 1, 7, 8, 63, 4097, 100_000, 4097]
    parameters = [
        Parameter(i, str(i), (n,), n, form.group_numel or (25 if i % 2 else max(1, n)), n > 8)
        for i, n in enumerate(numels)
    ]
    slots = [Slot(p.index, p.numel, p.group_numel, p.compressed, 0) for p in parameters]
    layouts = [PayloadLayout(form, ByElements(world).pieces(slots, rank)) for rank in range(world)]
    starts = np.stack([ByElements(world).starts(n) for n in numels])
    bounds = np.stack([starts[:, :-1], starts[:, 1:]], axis=1)
    (whole,) = sliced_nbytes(parameters, bounds, form)
    assert whole.tolist() == [layout.nbytes for layout in layouts]


NAMES_OF = {  # of gpt2, bert, resnet and llama, by preset
    "norm": """
        h.0.ln_1.weight ln_f.bias encoder.layer.0.attention.output.LayerNorm.weight bn1.weight
        layer1.0.bn2.bias model.layers.0.input_layernorm.weight model.norm.weight""",
    "embedding": """
        wte.weight wpe.weight embeddings.word_embeddings.weight model.embed_tokens.weight""",
    "head": "lm_head.weight classifier.weight fc.weight",
    "": """
        h.0.attn.c_attn.weight h.0.mlp.c_fc.weight conv1.weight layer1.0.conv1.weight
        model.layers.0.self_attn.q_proj.weight""",
}


@pytest.mark.parametrize("preset", ["norm", "embedding", "head"])
def test_presets_know_what_libraries_call_their_layers(preset):
    shapes = [(name, (64, 64)) for names in NAMES_OF.values() for name in names.split()]
    found = describe_parameters(shapes, lambda shape: 64, None, (preset,))
    assert {p.name for p in found if not p.compressed} == set(NAMES_OF[preset].split())


def test_vectors_travel_as_fp32_unless_a_number_says_otherwise():
    shapes = [("w", (64, 64)), ("small", (4, 4)), ("b", (5000,)), ("scalar", ())]
    compressed = {
        n: [p.name for p in describe_parameters(shapes, lambda s: 64, n, ()) if p.compressed]
        for n in (None, 1000, 0)
    }
    assert compressed == {None: ["w"], 1000: ["w", "b"], 0: ["w", "small", "b", "scalar"]}


def test_functions_exempt_by_name_and_shape_and_entries_without_use_are_refused():
    shapes = [("a.weight", (64, 64)), ("b.weight", (32, 64))]
    found = describe_parameters(shapes, lambda s: 64, None, (lambda name, shape: shape[0] == 32,))
    assert [p.compressed for p in found] == [True, False]
    for entry in ("norm", "c.*", lambda name, shape: False):
        with pytest.raises(ValueError, match="matches no parameter; names look like 'a.weight'"):
            describe_parameters(shapes, lambda s: 64, None, (entry,))


@given(
    nbytes=st.integers(*STREAM_NBYTES),
    cuts=st.lists(st.integers(0, 20_000) | st.just(4096) | st.just(8192), min_size=2, max_size=6),
)
def test_streams_of_a_piece_are_counted_at_any_cut(nbytes, cuts):
    """The same for numbers and arrays, in closed form and stream by stream."""
    form, cuts = stream_form(nbytes), sorted(cuts)
    assert form.stream_nbytes == nbytes and form.bits == nbytes / 512
    pairs = list(itertools.pairwise(cuts))
    want = [
        entropy.code_nbytes(reference.Piece(last - first, STREAM_NUMEL, first), nbytes)
        for first, last in pairs
    ]
    assert [form.code_nbytes(first, last) for first, last in pairs] == want
    first, last = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    assert form.code_nbytes(first, last).tolist() == want


@pytest.mark.parametrize("numel", [1, 2, 37, 511, 4095, 4096, 4097, 9000, 10**6 + 1])
def test_the_size_of_a_payload_says_its_bits(numel):
    """Of less than a stream several may have one size, which makes their payloads the same."""
    for nbytes in (*STREAM_NBYTES, 513, 1126, 2047):
        size = stream_form(nbytes).code_nbytes(0, numel)
        found = ENTROPY.of_payload(numel, size)
        assert found.code_nbytes(0, numel) == size
        assert found.stream_nbytes == nbytes or numel < STREAM_NUMEL
    low, high = (stream_form(nbytes).code_nbytes(0, numel) for nbytes in STREAM_NBYTES)
    assert ENTROPY.of_payload(numel, low - 1) == ENTROPY.of_payload(numel, high + 1) == ENTROPY
    for nbytes in STREAM_NBYTES:
        form = stream_form(nbytes)
        assert numel <= form.most_numel(form.code_nbytes(0, numel)) < numel + 2 * STREAM_NUMEL


def test_every_form_has_a_number_and_a_name_of_its_own():
    names = "identity ternary onebit lanes bfloat16 block2 block4 block8 removed entropy"
    found = {code: form.name for code, form in FORMS.items()}
    assert found | {9: "removed"} == dict(enumerate(names.split(), start=1))
    assert all(kind.form == FORMS[kind.form.code] for kind in KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)
