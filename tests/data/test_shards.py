import numpy as np
import pytest
from safetensors.numpy import load_file

from switchhead.data.shards import Shard, ShardedTokens, check_file, write_shard
from switchhead.errors import DataError

LENGTHS = (7, 0, 1, 30, 12)
WHOLE = np.random.default_rng(0).integers(0, 60000, sum(LENGTHS)).astype(np.uint16)


@pytest.fixture
def sharded(tmp_path):
    arrays = []
    for number, part in enumerate(np.split(WHOLE, np.cumsum(LENGTHS)[:-1])):
        write_shard(tmp_path / f"{number}.safetensors", part, documents=np.arange(0, len(part), 5))
        arrays.append(Shard(tmp_path / f"{number}.safetensors").tokens)
    return ShardedTokens(arrays, WHOLE.dtype)


@pytest.mark.parametrize("index", [slice(None), slice(3, 9), slice(5, 6), slice(9, 9), slice(-4, None), slice(40, 99)])
def test_slices_are_those_of_one_array(sharded, index):
    assert len(sharded) == len(WHOLE)
    assert sharded[index].dtype == WHOLE.dtype
    assert np.array_equal(sharded[index], WHOLE[index])
    assert np.array_equal(sharded.part(index)[:], WHOLE[index])
    assert np.array_equal(np.asarray(sharded.part(index)), WHOLE[index])


def test_positions_are_read_from_any_files_in_any_order(sharded):
    positions = np.random.default_rng(1).integers(0, len(WHOLE), (4, 33))
    assert np.array_equal(sharded[positions], WHOLE[positions])
    assert sharded[np.empty((0, 3), dtype=np.int64)].shape == (0, 3)
    part = sharded.part(slice(6, 30))
    assert np.array_equal(part[positions % 24], WHOLE[6:30][positions % 24])


@pytest.mark.parametrize("position", [-1, len(WHOLE)])
def test_a_position_outside_is_an_error(sharded, position):
    with pytest.raises(IndexError, match=f"of {len(WHOLE)} tokens"):
        sharded[np.array([0, position])]


def test_what_is_read_can_be_changed_without_changing_the_file(sharded):
    sharded[:][0] += 1
    sharded[np.array([0])][0] += 1
    assert sharded[:1] == WHOLE[:1]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_shard_is_a_safetensors_file_that_knows_its_documents(tmp_path, dtype):
    tokens = np.arange(10, dtype=dtype)
    write_shard(tmp_path / "a.safetensors", tokens, documents=np.array([0, 4, 9]))
    loaded, shard = load_file(tmp_path / "a.safetensors"), Shard(tmp_path / "a.safetensors")
    assert loaded["tokens"].dtype == shard.tokens.dtype == dtype
    assert loaded["documents"].tolist() == shard.documents.tolist() == [0, 4, 9]
    assert [shard.document(number).tolist() for number in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9]]


def test_a_file_that_is_no_shard_or_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read shard .*/a: No such file"):
        Shard(tmp_path / "a")
    for content in (b"", b"\x05\0\0\0\0\0\0\0{}   ", b"\xff" * 100, b'\x0d\0\0\0\0\0\0\0{"tokens": 1}'):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match=r"/a is no token shard, or damaged"):
            Shard(tmp_path / "a")


def test_sizes_and_checksums_are_compared(tmp_path):
    path = tmp_path / "a.safetensors"
    described = write_shard(path, WHOLE, documents=np.array([0]))
    check_file(path, described["size"], described["sha256"])
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    check_file(path, described["size"], None)
    with pytest.raises(DataError, match=r"shard .*a.safetensors is damaged, its checksum is not that of the manifest"):
        check_file(path, described["size"], described["sha256"])
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"a.safetensors has \d+ bytes instead of \d+"):
        check_file(path, described["size"], None)


class Watched(np.ndarray):
    """Notes when a part is taken of it."""

    def __getitem__(self, index):
        self.taken = True
        return super().__getitem__(index)


def test_a_slice_asks_only_the_files_that_have_some_of_it():
    arrays = [np.arange(5 * i, 5 * i + 5, dtype=np.uint16).view(Watched) for i in range(20)]
    tokens = ShardedTokens(arrays, np.dtype(np.uint16))
    assert tokens[33:41].tolist() == list(range(33, 41))
    assert [i for i, array in enumerate(arrays) if getattr(array, "taken", False)] == [6, 7, 8]
    assert tokens[100:100].tolist() == tokens[7:3].tolist() == []
