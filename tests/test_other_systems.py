"""Pack, change and read with what only Linux has hidden: as on macOS, as far as Linux can show it."""

import subprocess
import sys
from pathlib import Path

import pytest

_HIDE = """
import builtins, errno, io, mmap, os, socket

NAMES = {
    os: "memfd_create sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate copy_file_range splice eventfd "
    "pidfd_open getxattr setxattr listxattr O_DIRECT O_TMPFILE O_PATH fdatasync",
    mmap: "MADV_REMOVE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DOFORK MADV_DONTDUMP MADV_DODUMP MAP_POPULATE",
    socket: "SO_BINDTODEVICE TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_QUICKACK SOCK_CLOEXEC SOCK_NONBLOCK",
}
for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def hidden(function):
    def checked(path, *arguments, **keywords):
        is_path = isinstance(path, (str, bytes, os.PathLike))
        if is_path and os.fsdecode(path).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **keywords)
    return checked

builtins.open = io.open = hidden(open)
for name in "open stat lstat listdir scandir readlink statvfs".split():
    setattr(os, name, hidden(getattr(os, name)))
"""
_USE = """
import shardstream as ss
from shardstream.cli import main

folder, place, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.makedirs(f"{folder}/source/a")
for number in range(20):
    with open(f"{folder}/source/a/{number:02d}.txt", "w") as file:
        file.write(str(number))
ss.pack(f"{folder}/source", f"{place}/packed", max_samples=5)
with ss.ShardWriter(f"{place}/written", max_samples=10) as writer:
    for number in range(40):
        writer.write({"__key__": f"k{number:03d}", "txt": str(number), "cls": number % 3})
ss.reshard(f"{place}/written", f"{place}/again", max_samples=7)
ss.delete(f"{place}/written", keys=["k003"])
for name, count in {"packed": 20, "written": 39, "again": 40}.items():
    for cache in ({}, {"read": ss.ReadOptions(cache_dir=f"{folder}/cache")}):
        dataset = ss.ShardDataset(f"{place}/{name}", shuffle=True, **cache).decode().to_tuple("__key__", "txt")
        loader = ss.ShardLoader(dataset, batch_size=4, num_workers=workers)
        keys = [key for batch in loader for key in batch[0]]
        assert len(set(keys)) == len(keys) == count, (name, len(keys))
        loader.stats()
for command in ("verify", "ls", "bench", "doctor"):
    options = {"bench": ["--workers", "0", "--seconds", "0.1", "--batch-size", "4"], "doctor": ["--seconds", "0.1"]}
    assert main([command, f"{place}/written", *options.get(command, [])]) == 0, command
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_packing_and_reading_need_nothing_of_linux_alone(tmp_path: Path, workers: int) -> None:
    _run(str(tmp_path), f"{tmp_path}", workers)


@pytest.mark.slow
def test_s3_needs_nothing_of_linux_alone(tmp_path: Path, bucket: str, s3_env: None) -> None:
    _run(str(tmp_path), bucket, 0)


def _run(folder: str, place: str, workers: int) -> None:
    script = f"import sys\n{_HIDE}\n{_USE}"
    done = subprocess.run(
        [sys.executable, "-c", script, folder, place, str(workers)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
