"""Memory that stays from one measurement to the next."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.workspace import Workspace, copy_of, drop_free_memory, empty, give_back

MANY = 2**19  # float32 entries that are worth keeping: two megabytes


def test_memory_that_is_given_back_is_used_again():
    workspace = Workspace()
    with workspace.use():
        first = empty(MANY)
        address = first.data_ptr()
        give_back(first)
    assert workspace.free_bytes == 4 * MANY
    with workspace.use():
        assert empty(MANY // 2, dtype=torch.float64).data_ptr() == address
    assert workspace.free_bytes == 0


def test_no_two_tensors_share_memory():
    with Workspace().use():
        tensors = [empty(MANY) for _ in range(3)]
        give_back(tensors[1], tensors[1])  # twice by mistake
        tensors[1:2] = [empty(MANY) for _ in range(2)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [float(tensor.min()) for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]


def test_the_smallest_piece_that_fits_is_taken():
    with Workspace().use():
        large, small = empty(11 * MANY), empty(10 * MANY)
        addresses = large.data_ptr(), small.data_ptr()
        give_back(large, small)
        assert empty(MANY, 10).data_ptr() == addresses[1]
        assert empty(10, MANY).data_ptr() == addresses[0]


def test_all_memory_is_at_most_half_as_much_again_as_was_in_use_at_once():
    """A new piece replaces those that have been free for long, and a large one does not serve for something small."""
    workspace = Workspace()
    with workspace.use():
        give_back(*[empty(2 * MANY) for _ in range(3)])  # six in use at once
        first, second, third = (empty(MANY) for _ in range(3))
        assert workspace.free_bytes == 4 * 6 * MANY
        fourth = empty(MANY)  # ten would be more than nine
        assert workspace.free_bytes == 4 * 4 * MANY
        give_back(first, second, third, fourth)
        basis = empty(6 * MANY)  # of the free ones only the last ones stay
        assert workspace.free_bytes == 4 * 3 * MANY
        give_back(basis)
    assert workspace.free_bytes == 4 * 9 * MANY


def test_pieces_of_several_sizes_are_all_used_again():
    workspace, sizes = Workspace(), (6, 2, 2, 1)
    seen = []
    for _ in range(3):
        with workspace.use():
            pieces = [empty(size * MANY) for size in sizes]
            seen.append({piece.data_ptr() for piece in pieces})
            give_back(*pieces)
            give_back(empty(3 * MANY))
    assert seen[0] == seen[1] == seen[2]


def test_tensors_of_others_and_after_the_block_are_not_kept():
    workspace = Workspace()
    with workspace.use():
        give_back(torch.empty(MANY), torch.empty(()), torch.eye(2).to_sparse())
        kept = empty(MANY)
    give_back(kept)
    assert workspace.free_bytes == 0


def test_at_most_so_much_is_kept_and_nothing_when_memory_has_run_out():
    workspace = Workspace(most=6 * MANY)
    with workspace.use():
        give_back(*[empty(MANY) for _ in range(3)])
        assert workspace.free_bytes == 4 * MANY
        drop_free_memory()
    assert workspace.free_bytes == 0


@pytest.mark.parametrize(
    "tensor", [torch.arange(MANY).float(), torch.eye(1024).t()[::2], torch.ones(()), torch.ones(0)]
)
def test_copies_are_equal_and_apart(tensor):
    with Workspace().use():
        copy = copy_of(tensor)
        assert torch.equal(copy, tensor)
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("kept", [True, False])
def test_tensors_of_every_kind_are_preserved(kept):
    model = nn.Linear(2, 2)
    model.sparse, model.compressed = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    model.quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)
    with Workspace().use() if kept else nullcontext(), preserve_state(model):
        model.weight.data.zero_()
    assert bool(model.weight.any())
    assert torch.equal(model.quantized.dequantize(), torch.arange(4.0))
    assert torch.equal(model.compressed.to_dense(), torch.eye(3))


def test_a_model_is_restored_from_memory_that_was_used_before():
    model = nn.Linear(1024, 1024)
    before = model.weight.detach().clone()
    workspace = Workspace()
    with workspace.use():
        for _ in range(3):
            with preserve_state(model) as reset_state:
                model.weight.data.add_(1)
                with preserve_state(model):  # a second copy, of the changed weight
                    model.weight.data.zero_()
                assert torch.equal(model.weight, before + 1)
                reset_state()
                assert torch.equal(model.weight, before)
                model.weight.data.mul_(2)
            assert torch.equal(model.weight, before)
    assert workspace.free_bytes == 2 * 4 * 1024**2
