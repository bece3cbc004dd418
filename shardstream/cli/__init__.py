"""The command line: ``shardstream pack|reshard|merge|index|verify|ls|cat|view|bench``."""

from shardstream.cli.app import command_tree, main
from shardstream.cli.options import describe_options
from shardstream.cli.terminal import describe
from shardstream.cli.write_shards import parse_split

__all__ = [
    "command_tree",
    "describe",
    "describe_options",
    "main",
    "parse_split",
]
