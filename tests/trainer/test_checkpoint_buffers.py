"""The copies a checkpoint is written from, and the checksum of the written bytes."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ddp_trainer.checkpoint.buffers import Buffers
from ddp_trainer.checkpoint.staging import measure, measure_written

TENSORS = {
    "matrix": torch.arange(15.0).view(3, 5),
    "empty": torch.empty(0, 4),
    "number": torch.tensor(3.0),
    "bfloat16": torch.ones(7, dtype=torch.bfloat16),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "complex": torch.ones(4, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "uint16": torch.arange(5).to(torch.uint16),
}


def copies(buffers: Buffers, *tensors: Tensor) -> list[Tensor]:
    buffers.reuse()
    found = [buffers.copied(tensor) for tensor in tensors]
    buffers.finish()
    return found


def test_a_copy_has_the_values_of_a_tensor_in_row_major_order():
    buffers = Buffers()
    transposed = TENSORS["matrix"].t()
    parameter = nn.Parameter(torch.ones(2))
    first, second = copies(buffers, transposed, parameter)
    with torch.no_grad():
        parameter.zero_()
    assert first.is_contiguous()
    assert torch.equal(first, transposed)
    assert second.tolist() == [1, 1]
    assert type(second) is Tensor
    assert not second.requires_grad
    assert buffers.copied("text") == "text"


def test_the_next_checkpoint_uses_the_same_memory():
    buffers = Buffers()
    ones, twos = torch.ones(3, 4), torch.full((3, 4), 2.0)
    places = {copy.data_ptr() for copy in copies(buffers, ones, ones)}
    again = copies(buffers, twos, ones)
    assert {copy.data_ptr() for copy in again} == places
    assert [float(copy[0, 0]) for copy in again] == [2, 1]


def test_memory_without_a_use_is_freed():
    buffers = Buffers()
    copies(buffers, torch.ones(3), torch.ones(5))
    copies(buffers, torch.ones(3))
    place = copies(buffers, torch.ones(3))[0].data_ptr()
    buffers.reuse()
    assert [buffer.data_ptr() for free in buffers._free.values() for buffer in free] == [place]


def test_a_tensor_that_cannot_be_read_again_is_refused():
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        Buffers().copied(torch.eye(2).to_sparse())


def test_the_checksum_from_memory_is_that_of_the_file(tmp_path):
    path = tmp_path / "shard-00001.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    assert measure_written(path, TENSORS) == measure(path)
